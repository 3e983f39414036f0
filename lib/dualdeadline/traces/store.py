"""The trace store: one safetensors file per prompt, a parquet index with their hashes, the routers once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors import torch as safetensors

from dualdeadline import manifest, paths
from dualdeadline.corpus import Prompt
from dualdeadline.models import Routers

TENSORS = ("routes", "weights", "router_input", "router_logits", "layer_input", "tokens")
INDEX, META, ROUTERS, FILES = "index.parquet", "meta.json", "routers.safetensors", "prompts"
STAGE = "02_traces"


@dataclass
class Trace:
    """Decode steps of some prompts: rows of a prompt are contiguous and in decode order.

    Args:
        routes: [T,L,K] int64, routed experts, the largest weight first.
        weights: [T,L,K], their weights as executed, in the executed dtype like the three below.
        router_input: [T,L,H], what the router and the experts read (after the norm before them).
        router_logits: [T,L,E].
        layer_input: [T,L,H], state at the start of the decoder layer, before its attention.
        tokens: [T] int64, the token whose forward pass the row is.
        prompt: [T] int64, index into `prompt_ids` and `source`; prompts without rows do not appear.
        prompt_ids, source: per prompt.
        num_experts: E.
        routers: the model's router parameters.

    A tensor that `TraceStore.split` was not asked for is None.
    """

    routes: torch.Tensor
    weights: torch.Tensor
    router_input: torch.Tensor
    router_logits: torch.Tensor
    layer_input: torch.Tensor
    tokens: torch.Tensor
    prompt: torch.Tensor
    prompt_ids: list[str]
    source: list[str]
    num_experts: int
    routers: Routers | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def lengths(self) -> torch.Tensor:
        """[number of prompts] rows of each prompt."""
        return torch.bincount(self.prompt, minlength=len(self.prompt_ids))

    @property
    def prompt_starts(self) -> torch.Tensor:
        """[number of prompts] first row of each prompt."""
        return self.lengths.cumsum(0) - self.lengths

    def select(self, rows_or_prompts) -> Trace:
        """The part given by a boolean mask over rows [T], by prompt ids, or by indices of prompts.

        Prompts keep their order and are numbered anew; those left without rows disappear.
        """
        keep = self._mask(rows_or_prompts)
        left, prompt = self.prompt[keep].unique(return_inverse=True)
        parts = {name: getattr(self, name) for name in TENSORS}
        parts = {name: None if value is None else value[keep] for name, value in parts.items()}
        names = {name: [getattr(self, name)[i] for i in left.tolist()] for name in ("prompt_ids", "source")}
        return replace(self, prompt=prompt, **parts, **names)

    def _mask(self, chosen) -> torch.Tensor:
        if isinstance(chosen, (torch.Tensor, np.ndarray)):
            mask = torch.as_tensor(chosen)
            if mask.dtype == torch.bool:
                if mask.shape != self.prompt.shape:
                    raise ValueError(f"mask has shape {tuple(mask.shape)}; needed: one value per row, ({len(self)},)")
                return mask
            chosen = mask.tolist()
        places = {name: place for place, name in enumerate(self.prompt_ids)}
        wrong = [item for item in chosen if item not in places and item not in range(len(places))]
        if wrong:
            raise ValueError(f"prompts {wrong[:3]} are not in this trace of {len(places)} prompts")
        indices = [places.get(item, item) for item in chosen]
        return torch.isin(self.prompt, torch.tensor(indices, dtype=torch.long))


class TraceStore:
    """Read a folder that `collect` wrote; every file's SHA-256 is checked before its numbers are used.

    Args:
        path: the store's folder, e.g. `Workspace(profile).traces / "pilot"`.

    Raises:
        FileNotFoundError: no store there; names the stage that makes it.
        ValueError: an unfinished collection, a truncated or altered file, an unknown or empty split.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.meta: dict = json.loads(paths.need(self.path / META, STAGE).read_text(encoding="utf-8"))
        self.rows: pd.DataFrame = read_index(paths.need(self.path / INDEX, STAGE))
        # rows of prompts that the latest collection did not ask for are kept, at position -1
        self.index = self.rows[self.rows.position >= 0].reset_index(drop=True)
        if len(self.index) < self.meta["requested"]:
            raise ValueError(f"{self.path} holds {len(self.index)} of {self.meta['requested']} prompts: its collection "
                             f"was stopped; run notebook {STAGE} again, which goes on where it was")

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The collected prompts in the order of the corpus, without their texts (the corpus has those)."""
        names = ("id", "source", "split", "group")
        return [Prompt(*(row[name] for name in names), text="") for row in self.index.to_dict("records")]

    @cached_property
    def routers(self) -> Routers:
        """Router parameters of every MoE layer."""
        raw = self._read(ROUTERS, self.meta["routers_sha256"])
        facts = {name: self.meta[name] for name in ("eps", "kind", "norm_topk_prob", "scaling")}
        return Routers(**{name: raw.get(name) for name in ("weight", "bias", "norm", "correction")}, **facts)

    def split(self, name: str = "all", tensors: Iterable[str] = TENSORS) -> Trace:
        """All decode steps of the prompts of one split.

        Args:
            name: `train`, `validation`, `test` or `all`.
            tensors: fields to load; `("routes", "weights")` is all that a cache replay needs.
        """
        known = ("train", "validation", "test", "all")
        rows = self.index if name == "all" else self.index[self.index.split == name]
        rows = rows[rows.tokens > 0]
        if name not in known or rows.empty:
            counts = self.index.split.value_counts().to_dict()
            raise ValueError(f"split {name!r} has no traces; needed: one of {', '.join(known)} with some "
                             f"(here: {counts})")
        wanted = set(tensors)
        loaded = self._load(rows, wanted)
        lengths = torch.tensor(rows.tokens.to_numpy())
        return Trace(
            **{field: loaded.get(field) for field in TENSORS},
            prompt=torch.arange(len(rows)).repeat_interleave(lengths),
            prompt_ids=rows.id.tolist(), source=rows.source.tolist(),
            num_experts=self.meta["E"], routers=self.routers,
        )

    def _load(self, rows: pd.DataFrame, wanted: set[str]) -> dict[str, torch.Tensor]:
        """Tensors of all rows in one piece, filled file by file so that memory holds them once."""
        whole: dict[str, torch.Tensor] = {}
        start, total = 0, int(rows.tokens.sum())
        for row in rows.itertuples():
            parts = self._read(row.file, row.sha256)
            for field in wanted:
                part = parts[field]
                kind = part.dtype if part.is_floating_point() else torch.long
                if field not in whole:
                    whole[field] = torch.empty((total, *part.shape[1:]), dtype=kind)
                whole[field][start : start + row.tokens] = part
            start += row.tokens
        return whole

    def _read(self, name: str, sha256: str) -> dict[str, torch.Tensor]:
        try:
            return safetensors.load(sound_bytes(self.path / name, sha256))
        except ValueError as error:
            raise ValueError(f"{error}; run notebook {STAGE} again, which collects only what is missing or "
                             "broken") from None

    def verify(self) -> list[str]:
        """Every problem in the folder, one sentence each: missing, altered and foreign files; [] when sound."""
        found = [problem_with(self.path / ROUTERS, self.meta["routers_sha256"])]
        found += [problem_with(self.path / row.file, row.sha256) for row in self.rows.itertuples()]
        known = {self.path / name for name in self.rows.file}
        foreign = sorted(path for path in (self.path / FILES).glob("*") if path not in known)
        return [line for line in found if line] + [f"{path} is in no row of the index" for path in foreign]


def sound_bytes(path: Path, sha256: str) -> bytes:
    """Content of a file whose hash is known; ValueError says what is wrong with it."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    content = path.read_bytes()
    found = manifest.sha256(content)
    if found != sha256:
        raise ValueError(f"{path} was truncated or altered (SHA-256 {found[:12]}, needed {sha256[:12]})")
    return content


def problem_with(path: Path, sha256: str) -> str:
    """What is wrong with a file whose hash is known; empty when nothing is."""
    try:
        sound_bytes(path, sha256)
    except ValueError as error:
        return str(error)
    return ""


def read_index(path: Path) -> pd.DataFrame:
    """Rows of a store's index in the order of the corpus.

    Raises:
        ValueError: not a parquet file with the index's columns.
    """
    try:
        rows = pd.read_parquet(path)
        return rows.sort_values("position", ignore_index=True)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete that file and run notebook {STAGE} again") from None


def metadata(path: Path) -> dict[str, str]:
    """The text metadata of a prompt's file."""
    with safe_open(path, framework="pt") as handle:
        return handle.metadata() or {}
