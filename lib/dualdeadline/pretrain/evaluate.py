"""Held-out bits per byte, load balance and routing statistics of an exported checkpoint.

The numbers are those of the exported bfloat16 weights in stock transformers, not of the training forward.
Rows are written as JSON on the machine that measures and brought into the records by `import_rows`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from dualdeadline.pretrain import architectures, data

WINDOW, STRIDE, BATCH = 512, 256, 64
STAGE = "90_pilot_model"


def windows(stream: data.Stream, limit: int, window: int = WINDOW, stride: int = STRIDE, end: int = 0):
    """Windows over whole documents: list of (tokens with the last target, places not scored), and bytes.

    Each document is read after an end token, and every token but the first `window` of a document has at
    least `window - stride` tokens before it. The closing end token is not scored. Documents are taken
    evenly spaced until `limit` tokens.
    """
    ends = stream.lengths.cumsum()
    every = max(1, math.ceil(ends[-1] / limit))
    found, size = [], 0
    for document in range(0, len(ends), every):
        begin = ends[document] - stream.lengths[document]
        text = np.concatenate(([end], stream.tokens[begin : ends[document] - 1])).astype(np.int64)
        size += int(stream.sizes[document])
        for start in range(0, max(len(text) - 1, 0), stride):
            done = window - stride if start else 0
            if start and start + done >= len(text) - 1:
                break
            found.append((text[start : start + window + 1], done))
    return found, size


class Routing:
    """Counts of what the experts modules are given, by forward pre-hooks on `*.experts`."""

    def __init__(self, network):
        from dualdeadline import models

        spec, device = models.describe(network), network.device
        found = models.routers(spec)
        self.norms, self.routers = found.norm.float().to(device), found.weight.float().to(device)
        self.load = torch.zeros(spec.L, spec.E, dtype=torch.float64, device=device)
        self.sums = torch.zeros(4, spec.L, dtype=torch.float64, device=device)  # see `see` and `see_shared`
        self.tokens = self.pairs = 0
        self.keep = self.guess = None
        self.shared = False
        for number, layer in enumerate(spec.layers):
            layer.experts.register_forward_pre_hook(
                lambda module, given, number=number: self.see(number, *given))
            switch = getattr(layer.decoder.mlp, "shared_expert_gate", None)
            if switch is not None:
                self.shared = True
                switch.register_forward_hook(
                    lambda module, given, made, number=number: self.see_shared(number, made))

    def start(self, keep) -> None:
        """Say which positions bool[B, S] of the coming forward count (None: do not look)."""
        self.keep, self.guess = keep, None
        if keep is None:
            return
        self.both = keep[:, 1:] & keep[:, :-1]
        self.tokens += int(keep.sum())
        self.pairs += int(self.both.sum())

    def see(self, layer: int, hidden, index, weights) -> None:
        """Take one layer's experts input: hidden[N, H], index[N, K], weights[N, K]."""
        if self.keep is None:
            return
        routed = torch.zeros(len(index), self.load.shape[1], device=index.device).scatter_(1, index, 1.0)
        keep, grid = self.keep.flatten(), routed.view(*self.keep.shape, -1)
        self.load[layer] += routed[keep].sum(0)
        again = (grid[:, 1:] * grid[:, :-1]).sum(-1)[self.both]
        self.sums[0, layer] += again.sum(dtype=torch.float64) / index.shape[1]
        if self.guess is not None:
            right = routed.gather(1, self.guess)[keep]
            self.sums[1, layer] += right.sum(dtype=torch.float64) / index.shape[1]
        self.sums[2, layer] += weights.float().sum(1)[keep].sum(dtype=torch.float64)
        if layer + 1 < len(self.norms):
            moved = hidden.float() / self.norms[layer] * self.norms[layer + 1]
            self.guess = (moved @ self.routers[layer + 1].T).topk(index.shape[1]).indices


    def see_shared(self, layer: int, logits) -> None:
        """Take one layer's shared-expert gate before its sigmoid, [N, 1]."""
        if self.keep is not None:
            self.sums[3, layer] += logits.float().sigmoid().flatten()[self.keep.flatten()].sum(dtype=torch.float64)


@torch.no_grad()
def score(network, rows: list, start=lambda keep: None, batch: int = BATCH) -> tuple[float, int]:
    """Summed bits and number of scored tokens of `windows`; `start` is told which positions count."""
    device = network.device
    nats, count = torch.zeros((), dtype=torch.float64, device=device), 0
    rows = sorted(rows, key=lambda row: len(row[0]))
    for first in tqdm(range(0, len(rows), batch), "held-out", leave=False, disable=len(rows) < 20 * batch):
        part = rows[first : first + batch]
        tokens = torch.full((len(part), max(len(text) for text, _ in part)), network.config.pad_token_id)
        keep = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
        for place, (text, done) in enumerate(part):
            tokens[place, : len(text)] = torch.from_numpy(text)
            keep[place, done : len(text) - 1] = True
        tokens, keep = tokens.to(device), keep.to(device)
        start(keep)
        # padding stands at the right of a causal model, so it needs no mask
        logits = network(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[keep].float(), tokens[:, 1:][keep], reduction="none")
        nats, count = nats + loss.sum(dtype=torch.float64), count + int(keep.sum())
    return nats.item() / math.log(2), count


def load_network(folder: Path, device, experts: str | None = None):
    """The exported checkpoint in transformers, bfloat16, evaluation mode; `experts`: its implementation of them."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    if experts:
        network.set_experts_implementation(experts)
    return network


def measure(network, pack: data.Pack, limit: int, seconds: float = 120.0) -> list[dict]:
    """Rows (variant, metric, median, unit, kind, n, config) of one checkpoint.

    Raises:
        TimeoutError: not done after `seconds`.
    """
    begin, rows, natural, routing = time.monotonic(), [], [], Routing(network)
    for name, stream in pack.heldout.items():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{name} not evaluated within {seconds} s; lower --eval-tokens")
        found, size = windows(stream, limit)
        kind = "synthetic" if name in data.SYNTHETIC else "natural"
        start = routing.start if kind == "natural" else lambda keep: routing.start(None)
        bits, tokens = score(network, found, start)
        rows.append(row(name, "bits_per_byte", bits / size, "bit/byte", tokens, text=kind))
        rows.append(row(name, "bytes_per_token", size / tokens, "byte", tokens, text=kind))
        natural += [bits / size] if kind == "natural" else []
    macro = sum(natural) / len(natural)
    rows.append(row("macro", "bits_per_byte", macro, "bit/byte", len(natural), text="natural"))
    return rows + routing_rows(routing, network.config.num_experts_per_tok)


def routing_rows(routing: Routing, top_k: int) -> list[dict]:
    """Load balance per layer (1 = even) and routing statistics over the natural domains' scored tokens."""
    share = (routing.load / routing.load.sum(1, keepdim=True)).cpu()
    relative, sums, rows = share * share.shape[1], routing.sums.cpu(), []
    for layer, even in enumerate(relative):
        entropy = -(share[layer] * share[layer].clamp(min=1e-12).log2()).sum().item()
        stats = {"load_min": even.min().item(), "load_max": even.max().item(),
                 "load_cv": even.std(correction=0).item(), "load_entropy_bits": entropy,
                 "dead_experts": int((routing.load[layer] == 0).sum()),
                 "previous_token_reuse": (sums[0, layer] / max(routing.pairs, 1)).item(),
                 "routed_weight": (sums[2, layer] / routing.tokens).item()}
        if routing.shared:
            stats["shared_gate"] = (sums[3, layer] / routing.tokens).item()
        if layer:
            stats[f"gate_ahead_recall_at_{top_k}"] = (sums[1, layer] / routing.tokens).item()
        units = {name: "bit" if name.endswith("bits") else "1" for name in stats}
        rows += [row("routing", name, value, units[name], routing.tokens, layer=layer)
                 for name, value in stats.items()]
    rows += [row("load", "mean_expert_share", 1 / len(line), "1", routing.tokens, layer=layer,
                 shares=[round(value, 5) for value in line]) for layer, line in enumerate(share.tolist())]
    return rows


def row(variant: str, metric: str, median: float, unit: str, n: int, **config) -> dict:
    return {"variant": variant, "metric": metric, "median": median, "unit": unit, "kind": "measured", "n": n,
            "config": config}


def main(folder: Path, pack: data.Pack, out: Path, args) -> list[dict]:
    """Evaluate an exported folder and write rows with their provenance as JSON."""
    from dualdeadline import machine, record

    network = load_network(folder, args.device)
    try:
        rows = measure(network, pack, args.eval_tokens)
    except RuntimeError as error:  # grouped products refuse some widths on some devices
        print(f"evaluated with eager experts, since: {str(error)[:300]}")
        rows = measure(load_network(folder, args.device, "eager"), pack, args.eval_tokens)
    here = machine.describe()
    commit = os.environ.get("DUALDEADLINE_COMMIT") or record._git()[0]
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = {"stage": STAGE, "model": f"pilot-{architectures.name_of(network.config)}", "machine": here,
             "versions": record._versions(), "commit": commit, "time": when, "rows": rows}
    out.write_text(json.dumps(found, indent=1))
    for line in rows:
        if line["metric"] == "bits_per_byte":
            print(f"{line['variant']:>16} {line['median']:.4f} bits per byte ({line['n']} tokens)")
    loads = [line for line in rows if line["variant"] == "routing"]
    for metric in ("load_min", "load_max", "load_cv", "dead_experts", "previous_token_reuse", "shared_gate"):
        values = [line["median"] for line in loads if line["metric"] == metric]
        if values:
            print(f"{metric:>22} " + " ".join(f"{value:.2f}" for value in values))
    return rows


def import_rows(path: Path, workspace, revision: str, machine_id: str = "nvidia-h200", **extra):
    """Bring a `records.json` measured elsewhere into the records; `extra` are rows as name=(value, unit)."""
    from dualdeadline import record

    found = json.loads(Path(path).read_text())
    rows = found["rows"] + [row("training", name, value, unit, 1) for name, (value, unit) in extra.items()]
    given = {key: found[key] for key in ("versions", "commit", "time")}
    return record.import_rows(found["stage"], found["model"], revision, workspace, rows, machine_id,
                              found["machine"], **given)
