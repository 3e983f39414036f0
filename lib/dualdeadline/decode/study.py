"""The runs of the decode study as parts, each recorded when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualdeadline.decode import big, joules, measure, rows, singles
from dualdeadline.decode.cases import Case
from dualdeadline.decode.recorded import Recorded, with_controls
from dualdeadline.schedule import COMPONENTS

__all__ = ["apart", "build", "measured", "named", "with_controls"]


def build(
    recorded: Recorded, cases: Sequence[Case], seed: int, compile: bool = True, device=None, **sizes
) -> big.Variants:
    """A model of OLMoE's sizes (or of `shape` and `sizes`, see `big.build`), with a variant for every case."""
    return big.Variants(big.build(device or "cuda", seed=seed, **sizes), recorded, cases, seed, compile, device)


def named(parts: Iterator[tuple[str, list[dict]]], **config) -> Iterator[tuple[str, list[dict]]]:
    """The same parts with more in the config of every row."""
    for part, found in parts:
        yield part, [row | {"config": row["config"] | config} for row in found]


def apart(
    group: big.Variants, recorded: Recorded, resamples: int, seed: int, part: str, key: str
) -> Iterator[tuple[str, list[dict]]]:
    """Cases in one interleaved run of their own, after the check of their bits: the live control's, or warm ones that
    device memory does not hold beside the cold.

    Args:
        part: name. key: rows that have it in their config, and not as False, are kept; what they are compared with is
            recorded elsewhere.
    """
    stored = {wire: {name: store.bytes(name) for name in COMPONENTS} for wire, store in group.stores.items()}
    yield f"{part}, check", [_equal(group, recorded.spans[0].start)]
    found = rows.measured(measure.run(group, recorded.spans, seed), stored, resamples, seed)
    yield part, [row for row in found if row["config"].get(key, False) is not False]


def measured(
    group: big.Variants,
    recorded: Recorded,
    resamples: int,
    seed: int,
    wide: Sequence[Case] = (),
    wide_prompts: int = 2,
    chosen: Case | None = None,
    seconds: float = 0.0,
) -> Iterator[tuple[str, list[dict]]]:
    """Every case of a group in one interleaved run; rows as (part, rows).

    Args:
        wide: cases of the map of links and layers, which see the first `wide_prompts` prompts only.
        chosen, seconds: of `joules.rows`; 0 seconds: no energy.
    """
    stored = {wire: {part: store.bytes(part) for part in COMPONENTS} for wire, store in group.stores.items()}
    yield "sizes", rows.sizes_rows(stored)
    yield "check", [_equal(group, recorded.spans[0].start)]
    own = [case for case in group.cases if case not in wide]
    yield "steps", rows.measured(measure.run(group, recorded.spans, seed, own), stored, resamples, seed)
    yield "links", [measure.copies(group)]
    yield "singles", list(singles.rows(group))
    if wide:
        spread = measure.run(group, recorded.spans[:wide_prompts], seed, wide)
        yield "map", rows.measured(spread, stored, resamples, seed)
    if chosen and seconds:
        others = [own[0], Case(chosen.slots, "raw", "demand_serial"), chosen.base]
        yield "energy", joules.rows(group, recorded.spans, chosen, others, seconds, resamples, seed)


def _equal(group: big.Variants, first: int) -> dict:
    """Record row: steps from `first` on whose logits were found equal, and how the code around the experts ran."""
    compiled, compared = group.handle.captured.compiling, measure.check(group, first)
    said = dict(variant="all variants", metric="equal_logit_steps", unit="steps", kind="measured")
    return said | dict(n=compared, median=compared, config={"why": "; ".join(group.handle.why), "compiled": compiled})
