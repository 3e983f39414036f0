"""The runs of the decode study as parts, each recorded when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dualdeadline.decode import big, measure, rows
from dualdeadline.decode.cases import Case
from dualdeadline.decode.recorded import Recorded, controls
from dualdeadline.schedule import COMPONENTS


def with_controls(recorded: Recorded, seed: int) -> Recorded:
    """The same with scores that know everything, and with those of other steps."""
    own = controls(recorded.routes, recorded.E, seed)
    return replace(recorded, scores=recorded.scores | own)


def steps(
    recorded: Recorded, cases: Sequence[Case], resamples: int, seed: int, compile: bool = True, device=None, **sizes
) -> Iterator[tuple[str, list[dict]]]:
    """Every case on a model of OLMoE's sizes (or `sizes`), one interleaved run; rows as (part, rows)."""
    shared: dict = {}
    groups = [
        big.Variants(
            big.build(device or "cuda", seed=seed, **sizes),
            recorded,
            wire,
            [case for case in cases if case.wire == wire],
            shared,
            seed,
            compile,
            device,
        )
        for wire in dict.fromkeys(case.wire for case in cases)
    ]
    stored = {group.cases[0].wire: {part: group.handle.store.bytes(part) for part in COMPONENTS} for group in groups}
    yield "sizes", rows.sizes_rows(stored)
    compared = measure.check(groups, recorded.spans[0].start)
    yield "check", [
        dict(
            variant="all variants",
            metric="equal_logit_steps",
            unit="steps",
            kind="measured",
            n=compared,
            median=compared,
            config={"why": "; ".join(groups[0].handle.why), "compiled": compile},
        )
    ]
    found = measure.run(groups, recorded.spans, seed)
    yield "steps", rows.measured(found, stored, resamples, seed)
