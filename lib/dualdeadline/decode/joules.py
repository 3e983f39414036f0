"""Energy of decode steps: the chosen way against one deadline without guesses, in turn; others beside them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dualdeadline import energy
from dualdeadline.decode.big import Variants
from dualdeadline.decode.cases import Case

CHOSEN, REFERENCE = "chosen", "one deadline"


def rows(
    group: Variants,
    spans: Sequence[slice],
    chosen: Case,
    others: Sequence[Case],
    seconds: float,
    resamples: int,
    seed: int = 0,
) -> list[dict]:
    """Record rows: the ratio of joules per token with its interval, and joules per token of each.

    Args:
        chosen: compared with its own reference, one deadline without guesses. others: run alone, a twelfth of the time.
        seconds: of each of the two compared.
    """
    reference = Case(chosen.slots, chosen.wire, "demand_serial")
    tokens = min(span.stop - span.start for span in spans)
    calls = {CHOSEN: _prompts(group, chosen, spans), REFERENCE: _prompts(group, reference, spans)}
    found = energy.compare(calls, tokens, seconds, seconds / 10, seed)
    said = energy.ratio(found, CHOSEN, REFERENCE, resamples, seed)
    out = [said | {"config": said["config"] | {"slots": chosen.slots, "wire": chosen.wire, "guesses": chosen.name}}]
    for name, case in ((CHOSEN, chosen), (REFERENCE, reference)):
        part = found[found.name == name]
        joules = part.joules.sum() / part.tokens.sum()
        out.append(
            dict(
                variant=case.name,
                metric="joules_per_token",
                unit="J/token",
                kind="measured",
                n=int(part.tokens.sum()),
                median=joules,
                config=case.config() | {"source": part.source.iloc[0]},
            )
        )
    for case in others:
        out += energy.records(
            energy.per_token(_prompts(group, case, spans), tokens, seconds / 12), case.name, case.config()
        )
    return out


def _prompts(group: Variants, case: Case, spans: Sequence[slice]):
    """A call that decodes the next prompt's steps, as many of each as the shortest has."""
    turn, steps = itertools.cycle(spans), min(span.stop - span.start for span in spans)

    def call() -> None:
        group.rewind(case, next(turn).start)
        for _ in range(steps):
            group.step(case)

    return call
