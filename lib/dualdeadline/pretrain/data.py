"""Packed token streams: read them, mix them, draw training windows on the GPU."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SYNTHETIC = ("word-problems",)


@dataclass(frozen=True)
class Stream:
    """Documents of one domain, one after the other, each closed by the end token.

    tokens[N] uint16; lengths[D] tokens per document, end token included; sizes[D] bytes of UTF-8 each.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True)
class Pack:
    """Training and held-out streams by domain, vocabulary size and the pack's own index."""

    train: dict[str, np.ndarray]
    heldout: dict[str, Stream]
    vocab: int
    index: dict


def read(folder: Path) -> Pack:
    """Read `index.json` and every `*.u16.xz` it names.

    Raises:
        FileNotFoundError, ValueError: a part is missing or holds another number of tokens than indexed.
    """
    folder = Path(folder)
    if not (folder / "index.json").exists():
        raise FileNotFoundError(f"{folder / 'index.json'} is missing: run dualdeadline.pretrain.tokenizer")
    index = json.loads((folder / "index.json").read_text())
    train, heldout = {}, {}
    for name, entry in index["domains"].items():
        train[name] = _tokens(folder, entry["train"], index["vocab_size"])
        part = entry["heldout"]
        lengths, sizes = np.asarray(part["document_tokens"]), np.asarray(part["document_bytes"])
        heldout[name] = Stream(_tokens(folder, part, index["vocab_size"]), lengths, sizes)
        if heldout[name].lengths.sum() != len(heldout[name].tokens):
            raise ValueError(f"{name}: held-out documents add up to {heldout[name].lengths.sum()} tokens, "
                             f"the file has {len(heldout[name].tokens)}")
    return Pack(train, heldout, index["vocab_size"], index)


def _tokens(folder: Path, entry: dict, vocab: int) -> np.ndarray:
    path = folder / entry["file"]
    if not path.exists():
        raise FileNotFoundError(f"{path} is named by the pack's index and missing; build the pack again")
    tokens = np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")
    if len(tokens) != entry["tokens"] or (len(tokens) and tokens.max() >= vocab):
        raise ValueError(f"{path} has {len(tokens)} tokens up to {tokens.max(initial=0)}; the index says "
                         f"{entry['tokens']} tokens below {vocab}")
    return tokens


def mixture(sizes: dict[str, int], planned: float, fixed: dict[str, float] | None = None, power: float = 0.5,
            epochs: float = 12.0) -> dict[str, float]:
    """Share of windows per domain: sizes**power, none seen more than `epochs` times in `planned` tokens.

    `fixed` shares (synthetic text) are taken first; what a capped domain gives up goes to the others, and
    where all are capped the last ones share by size, each seen equally often.
    """
    fixed = fixed or {}
    shares, free = dict(fixed), {name: size**power for name, size in sizes.items() if name not in fixed}
    left = 1 - sum(fixed.values())
    while free:
        total = sum(free.values())
        capped = {name for name, part in free.items() if left * part / total * planned > epochs * sizes[name]}
        if capped == set(free):
            free = {name: sizes[name] for name in free}
            total, capped = sum(free.values()), set()
        if not capped:
            return shares | {name: left * part / total for name, part in free.items()}
        shares |= {name: epochs * sizes[name] / planned for name in capped}
        left -= sum(shares[name] for name in capped)
        free = {name: part for name, part in free.items() if name not in capped}
    return shares


class Sampler:
    """Draws windows of `length` + 1 tokens at random places of the domains, all on one device.

    The generator's state is the whole data cursor.
    """

    def __init__(self, train: dict[str, np.ndarray], shares: dict, length: int, device, seed: int):
        names = [name for name in train if shares.get(name, 0) > 0]
        short = [name for name in names if len(train[name]) < length + 2]
        if short or not names:
            raise ValueError(f"{short or list(train)} have too few tokens for windows of {length + 1}")
        sizes = np.array([len(train[name]) for name in names])
        flat = np.concatenate([train[name] for name in names]).astype(np.int16)
        self.tokens = torch.from_numpy(flat).to(device)
        self.start = torch.tensor(np.concatenate(([0], sizes.cumsum()[:-1])), device=device)
        self.room = torch.tensor(sizes - length, device=device)
        edges = torch.tensor([shares[name] for name in names], dtype=torch.float64).cumsum(0)
        self.edges = (edges / edges[-1]).float().to(device)
        self.offsets = torch.arange(length + 1, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64[batch, length]."""
        dice = torch.rand((2, batch), generator=self.generator, device=self.tokens.device)
        # stratified over the batch: every step has each domain's share, not only the average step
        place = (torch.arange(batch, device=self.tokens.device) + dice[0]) / batch
        domain = torch.searchsorted(self.edges, place).clamp_(max=len(self.edges) - 1)
        fine = torch.rand(batch, generator=self.generator, device=self.tokens.device, dtype=torch.float64)
        begin = self.start[domain] + (fine * self.room[domain]).long()
        window = self.tokens[begin[:, None] + self.offsets].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
