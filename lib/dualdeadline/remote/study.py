"""Round trips to a worker, taken apart: rows, sizes and links; what cannot be measured here is a row that says why."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from dualdeadline.remote.client import PARTS, Client
from dualdeadline.remote.keys import new_token
from dualdeadline.remote.link import FAR, Link, LinkError, Relay

SIZES = {"olmoe": (2048, 1024, 8), "tiny": (128, 32, 64)}  # H, F and experts: few of OLMoE's size, 96 MiB in bfloat16
ROWS, K = (1, 8, 32), 8
LINKS = {  # delay of each direction in ms, rate in Mbit/s
    "namespaces": (0.0, 0.0),
    "namespaces, 1 Gbit/s": (0.0, 1000.0),
    "namespaces, 0.5 ms each way": (0.5, 0.0),
}
RELAY_MS = 0.5
WARMUP, LEAST_MS, MOST = 1, 1.0, 0.03  # of round trips from 1 ms on, parts may leave out 3 %
LEFT = "not accounted for"
COLUMNS = ["shape", "link", "rows", "pairs", "part", "ms", "low", "high", "n", "why"]


@contextlib.contextmanager
def worker(sizes: Sequence[tuple[int, int, int]], token: Path, dtype: str = "bfloat16", sockets=()) -> Iterator[str]:
    """A worker process with a layer of random experts for each (H, F, E); its "host:port" on loopback.

    Args:
        sockets: that listen already, for it to serve as well.

    Raises:
        RuntimeError: it does not start.
    """
    words = [word for each in sizes for word in ("--synthetic", ",".join(map(str, each)))]
    numbers = [one.fileno() for one in sockets]
    words += [word for number in numbers for word in ("--listen-fd", str(number))]
    command = [sys.executable, "-m", "dualdeadline.remote.worker", "--token-file", str(token), "--dtype", dtype, *words]
    with subprocess.Popen(
        [*command, "--until-stdin-ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=numbers
    ) as process:
        try:
            said = process.stdout.readline()
            if not said.startswith("listening on "):
                raise RuntimeError(f"the worker says {said!r}; needed: where it listens (its errors are on stderr)")
            yield said.split()[-1]
        finally:
            process.kill()


def round_trips(
    sizes: Mapping[str, tuple[int, int, int]] | None = None,
    rows: Sequence[int] = ROWS,
    top_k: int = K,
    samples: int = 5,
    links: Mapping[str, tuple[float, float]] | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> pd.DataFrame:
    """Time of a request for `top_k` experts of each row over loopback, a relay with a delay, and namespaces.

    Args:
        sizes: by name, (H, F, experts held); default `SIZES`. links: delay and rate, default `LINKS`.

    Returns:
        DataFrame(shape, link, rows, pairs, part, ms, low, high, n, why): the mean of each of `client.PARTS`, of the
        "round trip" by a clock of its own and of a "ping" without work, with 20 and 80 %; of what is "not accounted
        for" the median, so that one interruption does not decide. A link that cannot be made here is one row without
        time, which says why.

    Raises:
        AssertionError: parts of a round trip of 1 ms or more miss it by more than 3 %.
    """
    sizes, links, found = SIZES if sizes is None else sizes, LINKS if links is None else links, []
    with contextlib.ExitStack() as stack:
        token = new_token(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "token")
        link, why, sockets = _link(stack) if links else (None, "", [])
        place = stack.enter_context(worker(list(sizes.values()), token, dtype, sockets))
        host, port = place.rsplit(":", 1)
        relay = Relay((host, int(port)), RELAY_MS)
        stack.callback(relay.close)
        near = {
            "loopback": Client(place, token),
            f"loopback, relay, {RELAY_MS:g} ms each way": Client("{}:{}".format(*relay.address), token),
        }
        todo = [(name, client, None) for name, client in near.items()]
        todo += [(name, None, slow) for name, slow in links.items()]
        for name, client, slow in tqdm(todo, desc="links", leave=False):
            try:
                if slow is not None:
                    client = _across(link, why, sockets, slow, token)
            except LinkError as error:
                found.append(("", name, 0, 0, "round trip", float("nan"), float("nan"), float("nan"), 0, str(error)))
                continue
            found += _measure(name, client, sizes, rows, top_k, samples, getattr(torch, dtype), seed)
            client.close()
    return check(pd.DataFrame(found, columns=COLUMNS))


def _link(stack: contextlib.ExitStack) -> tuple[Link | None, str, list]:
    try:
        link = stack.enter_context(Link())
        return link, "", [stack.enter_context(link.listen())]
    except LinkError as error:
        return None, str(error), []


def _across(link: Link | None, why: str, sockets: list, slow: tuple[float, float], token: Path) -> Client:
    if link is None:
        raise LinkError(why)
    link.slow(*slow)
    port = sockets[0].getsockname()[1]
    return Client(f"{FAR}:{port}", token, dial=lambda: link.dial(port))


def _measure(name, client: Client, sizes, rows, top_k, samples, dtype: torch.dtype, seed: int) -> list[tuple]:
    """Rows of one link; every request has tokens and routes of its own."""
    out, draw = [], torch.Generator().manual_seed(seed)
    pings = [client.ping() for _ in range(WARMUP + samples)][WARMUP:]
    out.append(("", name, 0, 0, "ping", *_three(pings), samples, ""))
    for number, (shape, (H, _, E)) in enumerate(sizes.items()):
        for count in rows:
            times: dict[str, list[float]] = {part: [] for part in (*PARTS, "round trip", LEFT)}
            for turn in range(WARMUP + samples):
                hidden = torch.randn(count, H, generator=draw).to(dtype)
                ids = torch.stack([torch.randperm(E, generator=draw)[:top_k] for _ in range(count)])
                weights = torch.rand(count, top_k, generator=draw).to(dtype)
                chosen = sorted(set(ids.flatten().tolist()))
                begun = time.perf_counter()
                client.experts(number, hidden, ids, weights, chosen)
                spent = 1e3 * (time.perf_counter() - begun)
                seen = {**client.last_ms, "round trip": spent, LEFT: spent - sum(client.last_ms.values())}
                for part, value in seen.items() if turn >= WARMUP else ():
                    times[part].append(value)
            for part, ms in times.items():
                three = (float(np.median(ms)), *_three(ms)[1:]) if part == LEFT else _three(ms)
                out.append((shape, name, count, count * top_k, part, *three, samples, ""))
    return out


def _three(ms) -> tuple[float, float, float]:
    return float(np.mean(ms)), *map(float, np.percentile(ms, (20, 80)))


def check(found: pd.DataFrame) -> pd.DataFrame:
    """The same table, if the parts of each round trip add up to it. Raises AssertionError, see `round_trips`."""
    for key, part in found[found["rows"] > 0].groupby(["shape", "link", "rows"], sort=False):
        table = part.set_index("part").ms
        left, whole = table[LEFT], table["round trip"]
        assert whole < LEAST_MS or abs(left) <= MOST * whole, f"{key}: {left:.3f} of {whole:.3f} ms are in no part"
    return found


def records(found: pd.DataFrame, config: Mapping | None = None) -> list[dict]:
    """Record rows: metrics `remote_ms` and `ping_ms`, the part, link and rows in the config."""
    out = []
    for row in found.itertuples():
        said = {"shape": row.shape, "link": row.link, "rows": row.rows, "pairs": row.pairs} | dict(config or {})
        said |= {"why": row.why} if row.why else {}
        value = {name: None if np.isnan(getattr(row, name)) else getattr(row, name) for name in ("ms", "low", "high")}
        out.append(
            dict(
                variant=row.part,
                metric="ping_ms" if row.part == "ping" else "remote_ms",
                unit="ms",
                kind="measured",
                median=value["ms"],
                low=value["low"],
                high=value["high"],
                n=row.n,
                config=said,
            )
        )
    return out
