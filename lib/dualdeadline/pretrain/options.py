"""What a training call can be told on its command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from dualdeadline.pretrain import architectures


def parser() -> argparse.ArgumentParser:
    """The command line of `dualdeadline.pretrain.train`."""
    cuda = torch.cuda.is_available()
    p = argparse.ArgumentParser(description="Train an embedded MoE by wall clock.")
    p.add_argument("--pack", type=Path, required=True, help="folder of index.json and *.u16.xz")
    p.add_argument("--bench", action="store_true", help="compare speeds and learning rates, write bench.json")
    p.add_argument("--train", action="store_true")
    p.add_argument("--out", default=os.environ.get("OUT", "data/pretrain/out"))
    p.add_argument("--state", default="/root/dd_state" if cuda else "data/pretrain/state")
    p.add_argument("--device", default="cuda" if cuda else "cpu")
    p.add_argument("--resume", action="store_true", help="continue from the state on this machine's disk")
    p.add_argument("--init-from", default="", help="folder of exported weights; fresh optimizer")
    for name, default, note in (
        ("minutes", 9.2, "of this call, all included"),
        ("reserve", 45.0, "seconds kept for the end"),
        ("lr", 4e-3, "AdamW peak"),
        ("muon-lr", 1e-2, "Muon peak"),
        ("weight-decay", 0.1, "matrices"),
        ("warmup", 10.0, "seconds"),
        ("decay", 0.3, "share of all training time"),
        ("dropout", 0.0, "rate"),
        ("balance", 0.01, "coefficient"),
        ("z", 0.001, "coefficient"),
        ("power", 0.5, "of the mixture"),
        ("planned-tokens", 1.2e9, "for the cap on epochs"),
        ("epochs", 16.0, "at most, natural domains"),
        ("synthetic", 0.06, "share"),
        ("report", 30.0, "seconds"),
        ("save-every", 120.0, "seconds"),
        ("bench-seconds", 300.0, "of the whole bench call"),
        ("probe-seconds", 20.0, "per learning rate"),
    ):
        p.add_argument(f"--{name}", type=float, default=default, help=f"{note} (default {default:g})")
    for name, default in (("calls-left", 1), ("batch", 128), ("length", 512), ("seed", 0), ("eval-tokens", 1_000_000)):
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--optimizer", default="muon", choices=("adamw", "muon"))
    p.add_argument("--architecture", default="olmoe", choices=tuple(architectures.ARCHITECTURES))
    p.add_argument("--experts", default="dense", choices=("dense", "sparse", "auto"))
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    p.add_argument("--model", default="{}", help="JSON: changes of the configuration (tests)")
    p.add_argument("--shares", default="{}", help="JSON: domain -> share, over the default mixture")
    p.add_argument("--variants", default="sparse:128x512,dense:128x512,sparse:256x512")
    p.add_argument(
        "--recipes",
        default="muon:1e-2,adamw:4e-3,muon:2e-2,muon:5e-3,muon:1e-2:weight_decay=0.5",
        help="optimizer:rate[:option=value ...], comma separated",
    )
    return p
