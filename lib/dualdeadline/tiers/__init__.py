"""Tiers below GPU memory, measured: what notebook 10 calls.

ssd_files.py   files of bounded size, as records and as scattered tensors
ssd.py         reads by size and depth, layouts, installs          ssd_replay.py   decode steps from an SSD
ssd_rows.py    record rows of all of them
"""
