"""What the live control lets guesses do, replayed over recorded routes by the rules of the slot tables (no times)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from dualdeadline.cache import slots as rules
from dualdeadline.decode.cases import Case, guess
from dualdeadline.decode.recorded import Recorded
from dualdeadline.decode.rows import row
from dualdeadline.engine.guide import GUESSES


def rows(
    drive: Recorded,
    slots: Sequence[int],
    guesses: Sequence[Sequence],
    break_evens: Sequence[float],
    prompts: int,
    resamples: int,
    seed: int,
) -> list[dict]:
    """Record rows of guesses over slots that start empty at each prompt, the control going on from prompt to prompt.

    `on_share`: calls in which guesses were let through. `in_time_share`: of what was fetched ahead, what the very next
    look-up asked for. `more_components`: that cross per token, beyond those without guesses.

    Args:
        guesses: arguments of `cases.guess`. break_evens: precision that the control asks for; 0: it never stops them.
    """
    out = []
    for count in slots:
        alone = replay(drive, Case(count), prompts)
        for one in guesses:
            for least in break_evens:
                case = replace(guess(Case(count), *one), break_even=least)
                found = replay(drive, case, prompts)
                for metric, unit, series in (
                    ("on_share", "share", found.on),
                    ("more_components", "components", found.crossed - alone.crossed),
                ):
                    out.append(row(case, case.name, metric, unit, "replayed", series, resamples, seed))
                share = found.in_time.sum() / max(found.ahead.sum(), 1e-9)  # of all prompts: some have no guesses
                said = dict(unit="share", kind="replayed", median=share, n=len(found), config=case.config())
                out.append(dict(variant=case.name, metric="in_time_share") | said)
    return out


def replay(drive: Recorded, case: Case, prompts: int) -> pd.DataFrame:
    """DataFrame(on, in_time, ahead, crossed) by prompt: share of calls, and components per token."""
    (T, L, _), found = drive.routes.shape, []
    tables, control = rules.SlotTables(L, drive.E, (case.slots, case.slots)), rules.control(case.break_even or 0.0)
    best = drive.scores[case.predictor].topk(min(GUESSES, drive.E), -1) if case.predictor else None
    for span in drive.spans[:prompts]:
        tables.clear()
        before, on = tables.counts(), 0
        for token in range(span.start, span.stop):
            for layer in range(L):
                rules.lookup(tables, layer, drive.routes[token : token + 1, layer])
                target = layer + drive.horizon
                if best is not None and target < L:
                    on += rules.is_on(control)
                    chances, ids = (values[token : token + 1, target] for values in best)
                    rules.admit(tables, target, ids, chances, case.threshold, case.budget, control)
        found.append(_counted(tables, before, span.stop - span.start, on / (L - drive.horizon)))
    return pd.DataFrame(found, index=pd.RangeIndex(len(found), name="prompt"))


def _counted(tables: rules.SlotTables, before: dict[str, int], tokens: int, on: float) -> dict[str, float]:
    new = {name: (count - before[name]) / tokens for name, count in tables.counts().items()}

    def both(event: str) -> float:
        return sum(new[f"{event}_{part}"] for part in rules.NAMES)

    return {
        "on": on / tokens,
        "in_time": both("in_time"),
        "ahead": both("fetched_ahead"),
        "crossed": both("misses") + both("fetched_ahead"),
    }
