"""Read, verify and write manifests; the one place that writes files atomically and hashes them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from dualdeadline import paths


def sha256(data: bytes | str) -> str:
    """Hex SHA-256 of bytes or of text in UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder and rename it to `path` when the block ends well.

    A block that raises (also on a full disk or Ctrl-C) leaves `path` as it was and no temporary file.
    The temporary name keeps the suffix of `path`, since some writers choose their format by it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text atomically, in UTF-8 with `\\n` line ends."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line, keys in the order given."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSON-lines file; a broken line is named by number."""
    rows = []
    # not splitlines: it also breaks at U+0085 and U+2028, which JSON leaves as they are inside a string
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n"), 1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); restore it with git checkout") from None
    return rows


def read_yaml(name: str) -> dict:
    """A committed manifest by file name, e.g. `models.yaml`."""
    path = paths.MANIFESTS / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: it is committed, restore it with git checkout")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def fingerprint() -> str:
    """First 16 hex digits of the hash over protocol, models and corpora: what a record row was made under."""
    digest = hashlib.sha256()
    files = [paths.MANIFESTS / "protocol.yaml", paths.MANIFESTS / "models.yaml", *sorted(paths.CORPORA.glob("*"))]
    for path in files:
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
