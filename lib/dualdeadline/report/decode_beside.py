"""What stands beside the engine's steps: other software, device memory under a limit, the live control replayed."""

from __future__ import annotations

import pandas as pd


def baselines(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps of what could be installed instead, on the same model."""
    part = rows[rows.metric == "baseline_step_ms"]
    frame = part.assign(tokens_per_s=1e3 / part["median"])[["variant", "config.way", "median", "tokens_per_s"]]
    return frame.rename(columns={"config.way": "how", "median": "step, ms", "tokens_per_s": "tokens/s"}).set_index(
        "variant"
    )


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """What was reserved on the device under each limit, and the slots per layer that it gave."""
    part = rows[rows.metric == "reserved_bytes"]
    if part.empty:
        return pd.DataFrame(columns=["limit, GiB"])
    gib = {"limit, GiB": part["config.limit_bytes"].astype(float) / 2**30, "reserved, GiB": part["median"] / 2**30}
    return part.assign(**gib, slots=part["config.slots"].astype(int)).set_index("variant")[[*gib, "slots"]]


def reserved(rows: pd.DataFrame) -> str:
    """`5.87 of 6.00 GiB (24 slots)` for each limit."""
    found = memory(rows)
    found = found[found["limit, GiB"] > 0] if len(found) else found
    parts = (f"{got:.2f} of {limit:.2f} GiB ({slots} slots)" for limit, got, slots in found.itertuples(index=False))
    return "; ".join(parts) or "nothing yet: not measured"


def stopped(rows: pd.DataFrame) -> pd.DataFrame:
    """Replayed guesses under the live control: how often they were let through, and what crossed for them."""
    part = rows[rows.kind == "replayed"]
    part = part.assign(slots=part["config.slots"].astype(int), least=part["config.break_even"].astype(float))
    names = {
        "on_share": "calls with guesses",
        "in_time_share": "asked for in time",
        "more_components": "more components per token",
    }
    wide = part.pivot_table(index=["variant", "slots", "least"], columns="metric", values="median", sort=False)
    return wide[list(names)].rename(columns=names).rename_axis(index=["guesses", "slots", "break-even"], columns=None)
