"""The runs of the decode study as parts, each recorded when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dualdeadline.decode import big, joules, measure, rows
from dualdeadline.decode.cases import Case
from dualdeadline.decode.recorded import Recorded, controls
from dualdeadline.schedule import COMPONENTS


def with_controls(recorded: Recorded, seed: int) -> Recorded:
    """The same with scores that know everything, and with those of other steps."""
    own = controls(recorded.routes, recorded.E, seed)
    return replace(recorded, scores=recorded.scores | own)


def build(
    recorded: Recorded, cases: Sequence[Case], seed: int, compile: bool = True, device=None, **sizes
) -> list[big.Variants]:
    """Models of OLMoE's sizes (or `sizes`), one for each wire, with a variant for every case."""
    shared: dict = {}
    return [
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


def measured(
    groups: Sequence[big.Variants],
    recorded: Recorded,
    resamples: int,
    seed: int,
    wide: Sequence[Case] = (),
    wide_prompts: int = 2,
    chosen: Case | None = None,
    seconds: float = 0.0,
) -> Iterator[tuple[str, list[dict]]]:
    """Every case of the groups in one interleaved run; rows as (part, rows).

    Args:
        wide: cases of the map of links and layers, which see the first `wide_prompts` prompts only.
        chosen, seconds: of `joules.rows`; 0 seconds: no energy.
    """
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
            config={"why": "; ".join(groups[0].handle.why), "compiled": groups[0].handle.captured.compiling},
        )
    ]
    own = [case for group in groups for case in group.cases if case not in wide]
    yield "steps", rows.measured(measure.run(groups, recorded.spans, seed, own), stored, resamples, seed)
    if wide:
        links = sorted({case.lanes for case in wide})
        yield "links", [measure.link(groups, lanes) for lanes in links]
        spread = measure.run(groups, recorded.spans[:wide_prompts], seed, list(wide))
        yield "map", rows.measured(spread, stored, resamples, seed)
    if chosen and seconds:
        others = [own[0], Case(chosen.slots, "raw", "demand_serial"), chosen.base]
        yield "energy", joules.rows(groups, recorded.spans, chosen, others, seconds, resamples, seed)
