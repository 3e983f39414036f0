"""Tiers below GPU memory, measured: what notebook 10 calls.

plain.py       what a disk gives by itself                         ssd_files.py   experts in files of bounded size
ssd.py         layouts of an expert on a disk, installs            ssd_replay.py  decode steps, the SSD tier alone
ssd_engine.py  whole steps of the engine                           ahead.py       reads ahead against demand
ssd_rows.py    record rows of all of them                          study.py       the notebook's parts
"""
