"""Where the second model's traces and predictors lie: apart from the first's, whose stages must not see them change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dualdeadline import corpus, models, paths, traces
from dualdeadline.traces import store
from dualdeadline.traces.collection import fingerprint


@dataclass(frozen=True)
class Place(paths.Workspace):
    """The workspace of a profile with traces, scores and sweeps of one model's own; records and figures stay."""

    model: str = ""

    @property
    def base(self) -> Path:
        return self.plain.base / "confirmation" / Path(self.model).name

    @property
    def plain(self) -> paths.Workspace:
        """The profile's workspace."""
        return paths.Workspace(self.profile)

    @property
    def records(self) -> Path:
        return self.plain.records

    @property
    def figures(self) -> Path:
        return self.plain.figures

    @property
    def generated(self) -> Path:
        return self.plain.generated


@dataclass(frozen=True)
class Decoding:
    """How prompts are decoded: steps at most and at least, prompts side by side, and sampling."""

    new_tokens: int
    min_new_tokens: int
    batch_size: int
    sampling: traces.Sampling

    def meta(self) -> dict:
        """What a store's meta says of it."""
        kept = {name: getattr(self, name) for name in ("new_tokens", "min_new_tokens")}
        return kept | {"sampling": asdict(self.sampling)}


class Model:
    """A model that is loaded when it is first needed: stores that are whole already do not need it."""

    def __init__(self, key: str):
        self.key, self._loaded = key, None

    @property
    def loaded(self) -> tuple:
        """Network and tokenizer."""
        if self._loaded is None:
            self._loaded = models.load(self.key)
        return self._loaded

    def made(self, meta: dict) -> bool:
        """Whether a store of this meta comes from this model: by the hub's commit, or by the weights."""
        commit = models.location(self.key)[1]
        if commit is not None and meta.get("revision") is not None:
            return meta["revision"] == models.revision(self.key)
        return meta.get("model") == fingerprint(self.loaded[0])


def stores(
    place: Place, corpora: Sequence[str], prompts: Sequence[int], how: Decoding, model: Model | None = None
) -> dict[str, traces.TraceStore]:
    """Traces of each corpus: notebook 02's, where they are of this model, these prompts and this decoding; else own.

    Own ones are collected into `place.traces`; what an earlier run left there is kept.

    Args:
        prompts: at most so many of each corpus, shares kept; 0: all.

    Raises:
        ValueError: not as many limits as corpora; see `traces.collect`.
    """
    if len(prompts) != len(corpora):
        raise ValueError(f"prompts are {list(prompts)}; needed: one limit for each of {', '.join(corpora)}")
    model, found = model or Model(place.model), {}
    for name, limit in zip(corpora, prompts):
        wanted = corpus.load(name, limit)
        for path in (place.plain.traces / name, place.traces / name):
            if whole(path, {prompt.id for prompt in wanted}, how, model):
                found[name] = traces.TraceStore(path)
                break
        else:
            network, tokenizer = model.loaded
            settings = (how.new_tokens, how.batch_size, how.sampling, True, how.min_new_tokens)
            found[name] = traces.collect(network, tokenizer, wanted, place.traces / name, *settings)
    return found


def whole(path: Path, wanted: set[str], how: Decoding, model: Model) -> bool:
    """Whether a folder holds a finished and sound store of just these prompts, of this decoding and model."""
    if not ((path / store.META).exists() and (path / store.INDEX).exists()):
        return False
    meta = json.loads((path / store.META).read_text(encoding="utf-8"))
    index = store.read_index(path / store.INDEX)
    asked = set(index[index.position >= 0].id)
    if asked != wanted or any(meta.get(name) != value for name, value in how.meta().items()):
        return False
    return model.made(meta) and not traces.TraceStore(path).verify()
