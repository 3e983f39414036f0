"""Amounts of memory as people write them."""

from __future__ import annotations

import re

UNITS = {
    "B": 1,
    "kB": 1000,
    **{f"{p}iB": 2 ** (10 * n) for n, p in enumerate("KMGT", 1)},
    **{f"{p}B": 10 ** (3 * n) for n, p in enumerate("KMGT", 1)},
}


def parse_bytes(size: int | str) -> int:
    """Bytes of `6442450944`, `6e9`, `"6GiB"` or `"800 MB"`.

    Raises:
        ValueError: anything else, or nothing above 0.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if found and found[2] in UNITS and float(found[1]) > 0:
        return int(float(found[1]) * UNITS[found[2]])
    whole = isinstance(size, int) and not isinstance(size, bool) or isinstance(size, float) and size.is_integer()
    if whole and size > 0:
        return int(size)
    raise ValueError(f"memory is {size!r}; needed: whole bytes above 0 as a number, or a text like '6GiB' or '800MB'")
