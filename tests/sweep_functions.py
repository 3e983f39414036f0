"""Functions that sweep workers import."""

import os
import time
from pathlib import Path

import numpy as np


def square(value, label="x"):
    return [{"square": np.int64(value**2), "half": np.float32(value / 2), "name": label * value}]


def fails_at(value, at):
    if value == at:
        raise ValueError(f"value is {value}")
    return {"square": value**2}


def slow_square(value, folder):
    Path(folder, f"{value}.started").write_text(str(os.getpid()))
    time.sleep(0.05 if value < 2 else 60)
    return {"square": value**2}
