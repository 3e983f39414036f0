"""The confirmation on a second architecture: from a model and prompts to targets, by the protocol's `confirmation`.

place.py    where its traces and predictors lie         fitting.py   what is fitted, and the choice on validation
replayed.py   hit rates and stalls of recorded routes   fused.py     the predictor kernel against its reference
blocks.py   blocks at the first, middle, last layer     shared.py    the expert that every token visits
measuring.py   recall, and its paired differences     deviations.py   what a run did otherwise than fixed
rows.py   record rows
`report.confirmation` shows the rows
"""
