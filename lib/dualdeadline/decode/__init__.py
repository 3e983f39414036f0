"""Decode steps of the engine at real size under recorded routes: cases, one interleaved run, record rows.

recorded.py   routes and predictor scores of the embedded model, one file
routes.py     the same for more layers, and drawn locality                     cases.py  what is compared
big.py        a model of a published size, random weights, and its variants  rows.py   record rows
stopped.py    what the live control lets guesses do, replayed
certificate.py  exactness of `offload` on a real model, product by product     memory.py  what a memory limit comes to
"""
