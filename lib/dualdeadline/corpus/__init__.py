"""Prompts with grouped splits: committed as ids and hashes, their texts made again at run time and checked."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from dualdeadline import manifest, models, paths
from dualdeadline.corpus import build, sources
from dualdeadline.corpus.build import SPLITS, templates

__all__ = ["SPLITS", "Prompt", "check_disjoint", "frame", "load", "names", "rebuilt", "rows", "templates"]


class Prompt(NamedTuple):
    """One prompt. `id` is a hash of source and key; prompts of one `group` share a split."""

    id: str
    source: str
    split: str
    group: str
    text: str


def names() -> list[str]:
    """Every corpus that can be loaded."""
    return [*build.SIZES, "ood", *_hub()["corpora"]]


def _hub() -> dict:
    return manifest.read_yaml("corpora/hub.yaml")


def load(name: str, limit: int = 0) -> list[Prompt]:
    """The prompts of a corpus, in the order of its manifest; every text is checked against its hash.

    A corpus of the hub that has no manifest yet is fetched at the commit its revision stands for now, and
    that commit is written into the new manifest, so that every later run reads the same one.

    Args:
        name: one of `names()`.
        limit: at most so many prompts, with the shares of sources and splits kept; 0 means all.

    Raises:
        ValueError: unknown corpus, a text that differs from the manifest's, an empty split, or a group, id or
            text that two splits, two corpora or the training text share.
    """
    if name not in names():
        raise ValueError(f"corpus is {name!r}; needed: one of {', '.join(names())}")
    if name in _hub()["corpora"] and not _path(name).exists():
        manifest.write_jsonl(_path(name), build.hub_rows(name, _hub()))
    listed = rows(name)
    check_disjoint(name)
    texts = _hub_texts(listed) if name in _hub()["corpora"] else {}
    chosen = shrink(listed, limit)
    return [
        Prompt(row["id"], row["source"], row["split"], row["group"], _checked(row, texts)) for row in chosen
    ]


def frame(prompts: dict[str, list[Prompt]], tokenizer) -> pd.DataFrame:
    """One line per prompt: corpus, the fields of `Prompt`, and its length in tokens as the model is given it."""
    rows = [prompt._asdict() | {"corpus": name, "tokens": len(models.encode(tokenizer, prompt.text))}
            for name, group in prompts.items() for prompt in group]
    return pd.DataFrame(rows)


def rebuilt(name: str) -> bool | None:
    """Whether the rules and the installed packages give the committed manifest again; None for a hub corpus."""
    return None if name in _hub()["corpora"] else build.rows(name) == rows(name)


def _path(name: str):
    return paths.CORPORA / f"{name}.jsonl"


def rows(name: str) -> list[dict]:
    """Manifest rows of a corpus: id, source, key, split, group, sha256 of the text, package, version."""
    if not _path(name).exists():
        raise FileNotFoundError(f"{_path(name)} is missing: it is committed, restore it with git checkout")
    return manifest.read_jsonl(_path(name))


def _hub_texts(listed: list[dict]) -> dict[tuple[str, str], str]:
    """(source, key) -> text of the data sets and commits that a manifest names."""
    recipes = _hub()["datasets"]
    commits = {(row["source"], row["version"]) for row in listed}
    return {(source, key): text for source, commit in sorted(commits)
            for key, text in sources.hub_texts(recipes[source], commit).items()}


def _checked(row: dict, texts: dict[tuple[str, str], str]) -> str:
    """The text of a row, from the hub's texts if they were read, else from its package."""
    try:
        text = texts[row["source"], row["key"]] if texts else sources.text(row["source"], row["key"])
    except (KeyError, ImportError, AttributeError, OSError):  # the package has moved or dropped it
        text = None
    if text is None or manifest.sha256(text) != row["sha256"]:
        here = "its text differs" if text is not None else "it is not there"
        found = row["version"] if texts else sources.version(row["package"])
        raise ValueError(f"prompt {row['id']} ({row['source']} {row['key']}): {here} in {row['package']} {found}; "
                         f"needed: {row['package']} {row['version']} (make .venv installs it)")
    return text


def shrink(listed: list[dict], limit: int) -> list[dict]:
    """At most `limit` rows with the shares of sources and splits kept, in the same order; 0 keeps all.

    Raises:
        ValueError: a limit that leaves a split empty.
    """
    if limit < 0:
        raise ValueError(f"limit is {limit}; needed: 0 for all prompts, or a positive number")
    if not limit:
        limit = len(listed)
    sizes = Counter((row["source"], row["split"]) for row in listed)
    seen: Counter = Counter()
    ranks = []
    for place, row in enumerate(listed):
        stratum = row["source"], row["split"]
        ranks.append((seen[stratum] / sizes[stratum], place))
        seen[stratum] += 1
    kept = [listed[place] for place in sorted(place for _, place in sorted(ranks)[:limit])]
    missing = [split for split in SPLITS if not any(row["split"] == split for row in kept)]
    if missing:
        raise ValueError(f"{limit} prompts leave the split {missing[0]} empty; needed: at least {len(sizes)} prompts")
    return kept


def check_disjoint(name: str) -> None:
    """Assert that a corpus shares nothing between its splits, with other corpora or with the training text.

    Raises:
        ValueError: what is shared, and by whom.
    """
    listed = rows(name)
    _unique(name, (row["id"] for row in listed), "prompt id")
    _unique(name, (row["sha256"] for row in listed), "prompt text")
    splits = {(row["source"], row["group"], row["split"]) for row in listed}
    _unique(name, ((source, group) for source, group, _ in splits), "group, in two splits")
    for other in _siblings(name):
        if _path(other).exists():
            both = [{row[key] for key in ("id", "sha256")} for row in itertools.chain(listed, rows(other))]
            _unique(f"{name} and {other}", itertools.chain.from_iterable(both), "prompt")
    taken = {row["group"] for row in listed} & {f"template {number}" for number in templates("pretrain")}
    if taken:
        raise ValueError(f"corpus {name} uses {sorted(taken)}, which the training text uses too")


def _siblings(name: str) -> set[str]:
    """The other corpora that the same models see: those from packages, or those from the hub."""
    hub = set(_hub()["corpora"])
    return (hub if name in hub else set(names()) - hub) - {name}


def _unique(where: str, values: Iterable, what: str) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"corpus {where}: {twice[0]} is there twice as a {what}; needed: once")
