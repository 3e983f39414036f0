"""Whole decode steps over recorded routes: what a schedule, a cache and a predictor do to the time of a token.

Slots are charged for speculation: with a budget of b experts the cache in front has b slots less per layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from dualdeadline import cache, manifest, metrics, schedule, simulate, streams
from dualdeadline.cost import CostModel
from dualdeadline.schedule import Copy, Layer, Schedule


@dataclass(frozen=True)
class Case:
    """One way to run a decode step.

    Attributes:
        schedule: one of `schedule.NAMES`. slots: cache slots per layer, LRU, emptied for each prompt.
        predictor: label of its scores; empty: no prefetch. horizon: layers ahead.
        budget: whole-expert bytes that may be copied ahead for one layer. piece: `expert` or `gate_up`.
        threshold: least probability of a guess. coded: whether experts cross the link encoded.
    """

    schedule: str
    slots: int
    predictor: str = ""
    horizon: int = 1
    budget: int = 0
    piece: str = "expert"
    threshold: float = 0.0
    coded: bool = False

    @property
    def base(self) -> Case:
        """The same without prefetch."""
        return Case(self.schedule, self.slots, coded=self.coded)

    def config(self) -> dict:
        return {
            "slots": self.slots,
            "horizon": self.horizon,
            "budget": self.budget,
            "piece": self.piece,
            "threshold": self.threshold,
            "predictor": self.predictor,
        }


def prefetch_cases(slots, predictors, horizons, budgets, thresholds, name="component_priority") -> list[Case]:
    """Every combination, with whole experts and with gate/ups copied ahead."""
    return [
        Case(name, size, predictor, horizon, budget, piece, threshold)
        for size in slots
        for predictor in predictors
        for horizon in horizons
        for budget in budgets
        for piece in ("expert", "gate_up")
        for threshold in thresholds
    ]


def sample_rows(prompt: np.ndarray, per_prompt: int, seed: int, warm: int = 8) -> np.ndarray:
    """Rows of some tokens of each prompt, none of the first `warm`, when every cache is still empty."""
    draw, rows = np.random.default_rng(seed), []
    for number in np.unique(prompt):
        mine = np.flatnonzero(prompt == number)[warm:]
        rows += sorted(draw.choice(mine, min(per_prompt, len(mine)), replace=False).tolist())
    return np.array(rows)


class Steps:
    """Recorded decode steps, and what the cases make of them.

    Args:
        routes: `[T,L,K]` of whole prompts, whose caches start empty. prompt: `[T]`. experts: E.
        rows: `[R]` rows that are run.
        scores: predictor and horizon -> probabilities `[R, L-horizon, E]` at those rows.
        component_bytes: dict(gate_up, down).
    """

    def __init__(self, routes, prompt, experts: int, rows, scores: dict[tuple[str, int], np.ndarray], component_bytes):
        self.routes, self.prompt, self.experts = np.asarray(routes), np.asarray(prompt), experts
        self.rows, self.scores, self.bytes = np.asarray(rows), scores, component_bytes
        self.coded_bytes: dict[str, int] = {}  # of the encoded components, for cases that ask for them
        self._resident: dict[int, np.ndarray] = {}

    def save(self, path: Path, **made_for) -> Path:
        """Everything but the bytes in one file, small enough to carry to the machine that measures.

        Args:
            made_for: what `load` has to ask for, such as corpus and seed.
        """
        tensors = {
            f"{label}/{horizon}": torch.as_tensor(found).half().contiguous()
            for (label, horizon), found in self.scores.items()
        }
        tensors |= {
            "routes": torch.as_tensor(self.routes).short().contiguous(),
            "prompt": torch.as_tensor(self.prompt),
            "rows": torch.as_tensor(self.rows),
        }
        with manifest.atomic(path) as temporary:
            save_file(
                tensors, temporary, {"experts": str(self.experts), "made_for": json.dumps(made_for, sort_keys=True)}
            )
        return path

    @classmethod
    def load(cls, path: Path, component_bytes, **made_for) -> Steps:
        """What `save` wrote for the same `made_for`.

        Raises:
            ValueError: the file is damaged, something else, or made for something else.
        """
        try:
            with safe_open(path, "np") as handle:
                found = {name: handle.get_tensor(name) for name in handle.keys()}
                experts, asked = int(handle.metadata()["experts"]), handle.metadata()["made_for"]
            own = {name: found.pop(name) for name in ("routes", "prompt", "rows")}
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"{path} holds no decode steps ({error}); remove it and run the notebook again") from None
        if json.loads(asked) != json.loads(json.dumps(made_for)) or own["routes"].max() >= experts:
            raise ValueError(f"{path} was made for {asked}; needed: {json.dumps(made_for, sort_keys=True)}")
        scores = {
            (name.rsplit("/", 1)[0], int(name.rsplit("/", 1)[1])): value.astype(np.float32)
            for name, value in found.items()
        }
        return cls(own["routes"].astype(np.int64), own["prompt"], experts, own["rows"], scores, component_bytes)

    def resident(self, slots: int) -> np.ndarray:
        """Whether an expert is in its layer's cache before each token, bool `[T,L,E]`."""
        if slots not in self._resident:
            nothing = np.zeros((len(self.routes), self.routes.shape[1] - 1, self.experts), np.float32)
            done = cache.prefetch_replay(self.routes, nothing, slots, 0, prompt=self.prompt)
            self._resident[slots] = done.resident
        return self._resident[slots]

    def schedule(self, case: Case, row: int) -> Schedule:
        """The step's schedule under a case."""
        held = self.resident(case.slots - case.budget)[row]
        layers = []
        for number, ids in enumerate(self.routes[row].tolist()):
            there = schedule.ready(np.flatnonzero(held[number]).tolist())
            guesses, source = self._guesses(case, row, number, held[number]), number - case.horizon
            layers.append(Layer(tuple(ids), there, guesses=guesses, guessed_at=max(source, -1)))
        if not case.coded:
            return schedule.step(case.schedule, layers, self.bytes)
        return schedule.with_decode(schedule.step(case.schedule, layers, self.coded_bytes))

    def _guesses(self, case: Case, row: int, number: int, held: np.ndarray) -> tuple:
        if not case.predictor or number < case.horizon:
            return ()
        place = int(np.flatnonzero(self.rows == row)[0])
        chance = np.where(held, -1.0, self.scores[case.predictor, case.horizon][place, number - case.horizon])
        most = case.budget
        if case.piece == "gate_up":
            most = case.budget * (self.bytes["gate_up"] + self.bytes["down"]) // self.bytes["gate_up"]
        best = np.argsort(-chance, kind="stable")[:most]
        return tuple((int(e), case.piece, float(chance[e])) for e in best if chance[e] >= max(case.threshold, 0.0))

    def simulate(self, cases: Sequence[Case], cost: CostModel) -> pd.DataFrame:
        """DataFrame(case, row, prompt, ms, bytes) of simulated steps; `case` is the place in `cases`."""
        found = []
        for row in tqdm(self.rows.tolist(), desc="simulated steps", leave=False, mininterval=1):
            for number, case in enumerate(cases):
                line = simulate.run(self.schedule(case, row), cost)
                found.append((number, row, self.prompt[row], line.ms, line.bytes))
        return pd.DataFrame(found, columns=["case", "row", "prompt", "ms", "bytes"])

    def measure(self, work: streams.Work, cases: Sequence[Case], repeats: int, seed: int) -> pd.DataFrame:
        """Executed steps, all cases of a token interleaved in random order.

        Returns:
            DataFrame(case, row, prompt, repeat, ms, bytes).

        Raises:
            AssertionError: the output of a step differs from the resident run in a bit.
        """
        draw, found = np.random.default_rng(seed), []
        for row in tqdm(self.rows.tolist(), desc="decode steps", leave=False, mininterval=1):
            work.tokens(
                1, self.routes.shape[2], work.kernels, seed=row, routes=torch.as_tensor(self.routes[row][:, None])
            )
            expected = torch.stack([work.resident(layer) for layer in range(work.layers)])
            plans = [self.schedule(case, row) for case in cases]
            for plan in plans:
                work.prepare(plan)
            for repeat in range(-1, repeats):  # the first round warms up and checks
                for number in draw.permutation(len(plans)):
                    work.out.zero_()
                    ms, moved = once(plans[number], work)
                    if repeat < 0:
                        assert torch.equal(work.out, expected), f"{cases[number]} changes the output of row {row}"
                    else:
                        found.append((number, row, self.prompt[row], repeat, ms, moved))
        return pd.DataFrame(found, columns=["case", "row", "prompt", "repeat", "ms", "bytes"])


def once(plan: Schedule, work: streams.Work) -> tuple[float, int]:
    """Milliseconds of one executed step, and the bytes that crossed the link for it."""
    if work.rewind:
        work.rewind()
    torch.cuda.synchronize(work.device)
    lanes = streams.CudaLanes(work.device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    marks, _ = streams.issue(plan, work, lanes)
    end.record()  # the last computation; speculation that is still in flight is not waited for
    lanes.close()
    copied = [plan.ops[place] for place in marks if isinstance(plan.ops[place], Copy)]  # cancelled ones have no mark
    return start.elapsed_time(end), sum(op.bytes for op in copied)


def differences(found: pd.DataFrame, cases: Sequence[Case], resamples: int, seed: int) -> pd.DataFrame:
    """Mean step time of each case less that of its base, with a two-level interval: prompts, then their samples.

    Args:
        found: of `Steps.measure` or `Steps.simulate` (which has one sample per row).

    Returns:
        DataFrame(case, mean, low, high, n): n prompts.
    """
    places = {case: number for number, case in enumerate(cases)}
    table, out = wide(found), []
    for case, number in places.items():
        if case.base != case and case.base in places:
            gap = table[number] - table[places[case.base]]
            out.append((number, *two_level(gap, resamples, seed)))
    return pd.DataFrame(out, columns=["case", "mean", "low", "high", "n"])


def between(found: pd.DataFrame, cases: Sequence[Case], base: str, resamples: int, seed: int) -> pd.DataFrame:
    """As `differences`, of each schedule without prefetch less the schedule `base` at the same slots."""
    table, out = wide(found), []
    plain = {(case.schedule, case.slots): number for number, case in enumerate(cases) if not case.predictor}
    for (name, slots), number in plain.items():
        if name != base and (base, slots) in plain:
            out.append((number, *two_level(table[number] - table[plain[base, slots]], resamples, seed)))
    return pd.DataFrame(out, columns=["case", "mean", "low", "high", "n"])


def wide(found: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by sample (prompt, row and repeat) and case."""
    sample = ["prompt", "row", *(["repeat"] if "repeat" in found else [])]
    return found.pivot_table(index=sample, columns="case", values="ms")


def two_level(values: pd.Series, resamples: int, seed: int) -> tuple[float, float, float, int]:
    """Mean over prompts of the mean over their samples, 95 % interval, prompts: both levels drawn anew.

    Args:
        values: indexed by prompt and anything below it.
    """
    draw = np.random.default_rng(seed)
    groups = [part.to_numpy() for _, part in values.groupby(level="prompt")]
    means = np.array([part.mean() for part in groups])
    # a resample of n samples has the mean of its group plus noise; drawn per group, then per prompt
    inner = np.stack([part[draw.integers(0, len(part), (resamples, len(part)))].mean(1) for part in groups], 1)
    chosen = draw.integers(0, len(groups), (resamples, len(groups)))
    low, high = np.percentile(np.take_along_axis(inner, chosen, 1).mean(1), metrics.INTERVAL)
    return float(means.mean()), float(low), float(high), len(groups)


def sign_agreement(measured: pd.DataFrame, simulated: pd.DataFrame, resamples: int, seed: int) -> dict:
    """Share of cases whose simulated sign equals the measured one, where the measured interval excludes 0.

    Args:
        measured, simulated: of `differences`, over the same cases.

    Returns:
        dict(median, low, high, n): share, 95 % interval over cases drawn anew, number of cases.

    Raises:
        ValueError: no case has a clear sign.
    """
    both = measured.merge(simulated, on="case", suffixes=("", "_simulated"))
    clear = both[(both.low > 0) | (both.high < 0)]
    if clear.empty:
        raise ValueError(f"none of {len(both)} cases has an interval that excludes 0; needed: more samples")
    same = (np.sign(clear["mean"]) == np.sign(clear.mean_simulated)).to_numpy(float)
    draws = np.random.default_rng(seed).integers(0, len(same), (resamples, len(same)))
    low, high = np.percentile(same[draws].mean(1), metrics.INTERVAL)
    return {"median": float(same.mean()), "low": float(low), "high": float(high), "n": len(same)}
