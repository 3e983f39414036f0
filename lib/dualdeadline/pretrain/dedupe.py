"""Near-duplicates, repeated paragraphs and overlap with test sets, all on hashed word n-grams."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import xxhash

WORD = re.compile(r"\w+")
SHINGLE, OVERLAP = 5, 13  # words per shingle of a near-duplicate; words shared with a test set that condemn
HASHES, BANDS, SIMILAR = (
    64,
    16,
    0.7,
)  # MinHash values per document, bands of them, Jaccard similarity of a duplicate
PARAGRAPH = 80  # characters from which a repeated paragraph is dropped
_known: dict[str, int] = {}


def grams(text: str, words: int) -> np.ndarray:
    """64-bit hashes of all runs of `words` words (case folded), sorted and unique; none in a shorter text."""
    tokens = WORD.findall(text.lower())
    ids = np.fromiter((_word(token) for token in tokens), np.uint64, len(tokens))
    if len(ids) < words:
        return np.empty(0, np.uint64)
    total = np.zeros(len(ids) - words + 1, np.uint64)
    for place in range(words):  # a polynomial in an odd constant: order matters, wrap-around is intended
        total = total * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + len(total)]
    return np.unique(total ^ (total >> np.uint64(29)))


def _word(token: str) -> int:
    value = _known.get(token)
    if value is None:
        if len(_known) > 2_000_000:
            _known.clear()
        value = _known[token] = xxhash.xxh64_intdigest(token.encode())
    return value


def signature(text: str) -> np.ndarray:
    """MinHash signature `[HASHES]` of a document's shingles (all ones when it has none)."""
    shingles = grams(text, SHINGLE)
    low = np.full(HASHES, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(shingles), 4096):
        mixed = shingles[start : start + 4096, None] * _FACTORS + _OFFSETS
        low = np.minimum(low, (mixed ^ (mixed >> np.uint64(31))).min(axis=0))
    return low


_random = np.random.default_rng(20261130)
_FACTORS = _random.integers(1, 2**63, HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _random.integers(0, 2**63, HASHES, dtype=np.uint64)


def near_duplicates(signatures: Iterable[np.ndarray | None]) -> list[bool]:
    """For each signature in order: is it similar to an earlier one that was kept? (None never is.)

    Candidates share one band of `HASHES // BANDS` values; the verdict is the estimated Jaccard similarity.
    """
    width, kept, buckets, verdict = HASHES // BANDS, [], {}, []
    for values in signatures:
        if values is None:
            verdict.append(False)
            continue
        keys = [(band, values[band * width : (band + 1) * width].tobytes()) for band in range(BANDS)]
        candidates = {index for key in keys for index in buckets.get(key, ())}
        duplicate = any(np.mean(kept[index] == values) >= SIMILAR for index in candidates)
        if not duplicate:
            for key in keys:
                buckets.setdefault(key, []).append(len(kept))
            kept.append(values)
        verdict.append(duplicate)
    return verdict


def fresh_paragraphs(text: str, seen: set[int]) -> str:
    """The text without long paragraphs met before; `seen` collects the hashes of those kept."""
    kept = []
    for paragraph in text.split("\n\n"):
        key = xxhash.xxh64_intdigest(" ".join(paragraph.split()).encode())
        if len(paragraph) >= PARAGRAPH:
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def shares(text: str, forbidden: np.ndarray) -> bool:
    """Does the text contain one of the forbidden 13-word runs (sorted hashes of `grams(..., OVERLAP)`)?"""
    found = grams(text, OVERLAP)
    place = np.searchsorted(forbidden, found)
    place[place == len(forbidden)] = 0
    return bool(len(forbidden)) and bool((forbidden[place] == found).any())
