"""How a number is written: value with interval, count, verdict."""

from __future__ import annotations

import math

OPEN = "open (no data yet)"
SUPPORTED, NOT_SUPPORTED = "supported", "not supported"


def _missing(number) -> bool:
    return number is None or math.isnan(number)


def value(median, low=None, high=None, digits: int = 3, unit: str = "") -> str:
    """`0.763 [0.758, 0.769]`, without brackets where there is no interval; a missing median is a dash."""
    if _missing(median):
        return "–"
    text = f"{median:.{digits}f}"
    if not (_missing(low) or _missing(high)):
        text += f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{text} {unit}".rstrip()


def count(number) -> str:
    """An integer with a comma every three digits."""
    if number != int(number):
        raise ValueError(f"a count is {number!r}; needed: a whole number")
    return f"{int(number):,}"


def verdict(low, high, direction: str = "greater", bound: float = 0.0) -> str:
    """Whether an interval lies wholly on the claimed side of `bound`.

    Args:
        low, high: ends of the paired interval that the protocol names; None or NaN: not measured yet.
        direction: `greater` or `less`, the side that supports the hypothesis.

    Returns:
        `supported`, `not supported` or `open (no data yet)`. Touching the bound is not support.
    """
    if direction not in ("greater", "less"):
        raise ValueError(f"direction is {direction!r}; needed: 'greater' or 'less'")
    if _missing(low) or _missing(high):
        return OPEN
    if low > high:
        raise ValueError(f"interval [{low}, {high}] is empty; needed: low <= high")
    supported = low > bound if direction == "greater" else high < bound
    return SUPPORTED if supported else NOT_SUPPORTED
