"""Write what `paper/main.tex` includes, and build the PDF where LaTeX exists."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
from PIL import Image

from dualdeadline import manifest, paths, record
from dualdeadline.report import figures, latex, numbers, published
from dualdeadline.report.tables import Subject

HEAD = "% Generated from data_manifests/records by notebooks/12_paper.py; edits here are lost.\n"
INSTALL = (
    "apt-get install --no-install-recommends texlive-latex-recommended texlive-science lmodern latexmk; "
    "or take the PDF that the paper workflow keeps for 30 days"
)


def write(about: Subject) -> list[Path]:
    """Write `tables.tex` and `numbers.tex` into the workspace's generated folder; their paths."""
    workspace = about.workspace
    tables = "".join(latex.table(make(about)) + "\n" for make in published.TABLES.values())
    macros = "".join(
        latex.define(number.name, latex.escape(number.text), number.source) for number in numbers.every(about)
    )
    files = {"tables.tex": tables, "numbers.tex": macros + _figures(workspace)}
    for name, text in files.items():
        manifest.write_text(workspace.generated / name, HEAD + text)
    return [workspace.generated / name for name in files]


def behind(png: Path) -> dict:
    """What a saved figure says it was drawn from: stages, models, machines, metrics, and their fingerprint.

    Raises:
        ValueError: the file was not saved by `report.save`.
    """
    with Image.open(png) as image:
        stamp = image.info.get("Comment")
    if not stamp:
        raise ValueError(f"{png} names no records; save figures with report.save")
    return json.loads(stamp)


def stale(png: Path, workspace: paths.Workspace) -> bool:
    """Whether the records that a figure was drawn from have changed since."""
    stamp = behind(png)
    return figures.fingerprint(workspace, stamp) != stamp["records"]


def figure_rows(png: Path, workspace: paths.Workspace) -> pd.DataFrame:
    """The record rows behind a saved figure."""
    stamp = behind(png)
    rows = pd.concat([record.visible(workspace, stage) for stage in stamp["stage"]])
    for key in ("model", "machine", "metric"):
        rows = rows[rows[key].isin(stamp[key])]
    return rows


def _figures(workspace: paths.Workspace) -> str:
    r"""`\figurefolder`, and one `\figuremadeby{name}` text per figure, for captions."""
    folder = os.path.relpath(workspace.figures, workspace.generated.parent)
    lines = [f"\\newcommand{{\\figurefolder}}{{{folder}/}}\n"]
    for png in sorted(workspace.figures.glob("*.png")):
        source = latex.made_by(figure_rows(png, workspace))
        lines.append(f"\\expandafter\\def\\csname figure@{png.stem}\\endcsname{{{latex.escape(source)}}}\n")
    return "".join(lines)


def build(workspace: paths.Workspace) -> Path | None:
    """Typeset `main.tex` with this workspace's tables and figures; path of the PDF, None without latexmk.

    Raises:
        RuntimeError: LaTeX stopped; shows the end of its log.
    """
    if shutil.which("latexmk") is None:
        return None
    folder = workspace.generated.parent
    if folder != paths.PAPER:
        for name in ("main.tex", "refs.bib"):
            manifest.write_text(folder / name, (paths.PAPER / name).read_text(encoding="utf-8"))
    command = ["latexmk", "-pdf", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if run.returncode:
        raise RuntimeError(f"latexmk failed in {folder}:\n{run.stdout[-2000:]}")
    return folder / "main.pdf"


def preview(pdf: Path, page: int = 1, dpi: int = 70):
    """One page of the PDF as an image for a notebook, None without pdftoppm."""
    if shutil.which("pdftoppm") is None:
        return None
    stem = pdf.with_name(f"{pdf.stem}-page")
    options = ["-png", "-singlefile", "-r", str(dpi), "-f", str(page), "-l", str(page)]
    subprocess.run(["pdftoppm", *options, str(pdf), str(stem)], check=True)
    with Image.open(stem.with_suffix(".png")) as image:
        image.load()
    stem.with_suffix(".png").unlink()
    return image
