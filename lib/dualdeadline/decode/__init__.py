"""Decode steps of the engine at real size under recorded routes: cases, one interleaved run, record rows.

recorded.py   routes and predictor scores of the embedded model, one file      cases.py  what is compared
big.py        a model of OLMoE's sizes with random weights, and its variants   rows.py   record rows
certificate.py  exactness of `offload` on a real model, product by product
"""
