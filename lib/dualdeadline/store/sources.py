"""Where a conversion takes experts from: a model in memory, or a folder of safetensors as Hugging Face stores it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm.auto import tqdm

from dualdeadline import manifest
from dualdeadline.schedule import COMPONENTS
from dualdeadline.store.pages import as_bytes, checksum

if TYPE_CHECKING:
    from dualdeadline.engine.surgery import LayerExperts

# an expert's own tensors: gate, up, down in the families' names
SINGLE = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight$")
# all experts of a layer in one tensor [E, ...]
FUSED = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)$")
ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


class ModelExperts:
    """Experts of a model in memory.

    Args:
        layers: of `engine.surgery.find`.
    """

    def __init__(self, layers: Sequence[LayerExperts]):
        self.layers, self.L, self.E = list(layers), len(layers), layers[0].E

    def whole(self, number: int, component: str) -> Tensor:
        """`[E, rows, columns]` of a layer."""
        from dualdeadline.engine.surgery import HELD, PARAMETERS

        module = self.layers[number].module
        held = module.__dict__.get(HELD)  # weights that never were the model's
        return (held[component] if held else getattr(module, PARAMETERS[component])).detach()

    def __call__(self, number: int, expert: int) -> dict[str, Tensor]:
        """One expert's components on the CPU."""
        return {part: self.whole(number, part)[expert].cpu().contiguous() for part in COMPONENTS}


@dataclass
class CheckpointExperts:
    """Experts in the safetensors files of a folder, as `save_pretrained` or the hub's files hold them.

    Layers are the MoE layers by rising number. Per expert one tensor each of gate, up and down (gate/up is their
    rows one after the other), or per layer fused `gate_up_proj [E,...]` and `down_proj [E,...]`, taken as they are.

    Raises:
        FileNotFoundError: no safetensors. ValueError: no experts, or some are missing.
    """

    folder: Path
    files: dict[str, Path] = field(init=False)  # by tensor
    L: int = field(init=False)
    E: int = field(init=False)

    def __post_init__(self):
        self.folder = Path(self.folder)
        self.files = _files(self.folder)
        self._open: dict[Path, object] = {}
        self._single: dict[tuple[int, int], dict[str, str]] = {}
        self._fused: dict[int, dict[str, str]] = {}
        for name in self.files:
            if found := SINGLE.search(name):
                self._single.setdefault((int(found[1]), int(found[2])), {})[ROLE[found[3]]] = name
            elif found := FUSED.search(name):
                self._fused.setdefault(int(found[1]), {})[found[2].removesuffix("_proj")] = name
        self._numbers = sorted(self._fused or {number for number, _ in self._single})
        self.L = len(self._numbers)
        self.E = self._count()
        self._check()

    def _count(self) -> int:
        if not self.L:
            raise ValueError(
                f"{self.folder} holds {len(self.files)} tensors and no experts; needed: names like "
                "layers.0.mlp.experts.0.gate_proj.weight or layers.0.mlp.experts.gate_up_proj"
            )
        if self._fused:
            return len(self._slice(self._fused[self._numbers[0]]["down"]))
        return 1 + max(expert for _, expert in self._single)

    def _check(self) -> None:
        wanted = {"gate_up", "down"} if self._fused else {"gate", "up", "down"}
        kept = self._fused or self._single
        keys = self._numbers if self._fused else [(n, e) for n in self._numbers for e in range(self.E)]
        for key in keys:
            if set(kept.get(key, ())) != wanted:
                raise ValueError(
                    f"{self.folder}: layer and expert {key} have {sorted(kept.get(key, ()))}; needed: {sorted(wanted)}"
                )

    def __call__(self, number: int, expert: int) -> dict[str, Tensor]:
        """One expert's components; `number` counts MoE layers."""
        at = self._numbers[number]
        if self._fused:
            return {part: self._slice(self._fused[at][part])[expert].contiguous() for part in COMPONENTS}
        gate, up, down = (self._tensor(self._single[at, expert][role]) for role in ("gate", "up", "down"))
        return {"gate_up": torch.cat([gate, up]), "down": down}

    def _handle(self, name: str):
        path = self.files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]

    def _tensor(self, name: str) -> Tensor:
        return self._handle(name).get_tensor(name)

    def _slice(self, name: str):
        found = self._handle(name).get_slice(name)
        return _Rows(found)


class _Rows:
    """A tensor in a file, read one row `[e]` at a time."""

    def __init__(self, found):
        self.found = found

    def __len__(self) -> int:
        return self.found.get_shape()[0]

    def __getitem__(self, row: int) -> Tensor:
        return self.found[row : row + 1][0]


def _files(folder: Path) -> dict[str, Path]:
    """By tensor, the file that holds it: as the index says, or of all files there are."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors; needed: a checkpoint's folder")
    found = {}
    for path in files:
        with safe_open(path, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), path)
    return found


def key(source: ModelExperts | CheckpointExperts) -> str:
    """Hash over all experts' weights: the same for the same experts, wherever they are; reads each of them once."""

    def sums(pair: tuple[int, int]) -> list[int]:
        components = source(*pair)
        return [checksum(as_bytes(components[part])) for part in COMPONENTS]

    first = source(0, 0)
    said = [source.L, source.E, [[str(first[part].dtype), *first[part].shape] for part in COMPONENTS]]
    pairs = [(number, expert) for number in range(source.L) for expert in range(source.E)]
    with ThreadPoolExecutor() as pool:
        found = list(tqdm(pool.map(sums, pairs), "checkpoint's key", len(pairs), unit="expert", leave=False))
    return manifest.sha256(json.dumps([said, found]))
