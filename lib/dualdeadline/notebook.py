"""Notebooks as text: read, check parameters, build, and put the outputs of a run beside the text.

The `py:percent` file is the source. The paired `.ipynb` is always made from it, in this one direction, with
cell ids that depend on the cells alone, so that two builds of the same text are the same bytes.
"""

from __future__ import annotations

import ast
import base64
import io
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from dualdeadline import manifest, paths

if TYPE_CHECKING:  # importing nbformat takes seconds, and processes that only hash code import this module
    from nbformat import NotebookNode

TAGS = ("parameters", "gpu", "slow", "figure", "table", "nbval-check-output", "nbval-skip")
KEPT_TYPES = ("text/plain", "text/markdown", "text/html", "text/latex", "image/png")
PNG_LIMIT_BYTES = 250_000
TEXT_LIMIT = 20_000  # characters of one output


def sources(folder: Path = paths.NOTEBOOKS) -> dict[str, Path]:
    """Stage name -> text file, in reading order (`NN_name.py`)."""
    return {path.stem: path for path in sorted(folder.glob("[0-9][0-9]_*.py"))}


def load(path: Path) -> NotebookNode:
    """The notebook of a text file, without outputs, with stable ids and a mark that says where it comes from.

    Raises:
        ValueError: the file is no py:percent notebook.
    """
    import jupytext

    notebook = jupytext.read(path, fmt="py:percent")
    if "kernelspec" not in notebook.metadata:
        raise ValueError(f"{path}: no header with a kernelspec; copy the header of another notebook")
    seen: Counter = Counter()
    for cell in notebook.cells:
        text = f"{cell.cell_type}\0{cell.source}"
        cell.id = manifest.sha256(f"{path.stem}\0{text}\0{seen[text]}")[:12]
        seen[text] += 1
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.dualdeadline = {"generated": f"from {path.name} by `make notebooks`; edit that text"}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def code(notebook: NotebookNode) -> str:
    """All code cells as one module text."""
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def parameters(notebook: NotebookNode, stage: str) -> dict[str, object]:
    """Name -> default of the one cell tagged `parameters`.

    Raises:
        ValueError: no such cell or several, anything but `name = literal`, or None (it has no useful type).
    """
    cells = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    if len(cells) != 1:
        raise ValueError(f"{stage}: {len(cells)} cells are tagged parameters; needed: exactly one")
    found = {}
    for node in ast.parse(cells[0].source).body:
        try:
            (target,) = node.targets
            found[target.id] = ast.literal_eval(node.value)
        except (AttributeError, ValueError):
            got = ast.unparse(node)
            raise ValueError(f"{stage}: `{got}` in the parameters cell; needed: name = literal") from None
        if found[target.id] is None:
            raise ValueError(f"{stage}: {target.id} has the default None; needed: a value with a type")
    return found


def resolve(stage: str, declared: dict, given: dict) -> dict:
    """Defaults overlaid with the given values.

    Raises:
        ValueError: a name that the notebook does not declare, or a value of another type than its default's
            (an int may stand for a float; bool and int never for each other).
    """
    for name, value in given.items():
        if name not in declared:
            raise ValueError(f"{stage} has no parameter {name!r}; it has: {', '.join(declared) or 'none'}")
        if not _fits(value, declared[name]):
            needed = f"{_kind(declared[name])}, such as the default {declared[name]!r}"
            raise ValueError(f"{stage}: {name} = {value!r} is {_kind(value)}; needed: {needed}")
    return {name: _like(given.get(name, default), default) for name, default in declared.items()}


def _fits(value, default) -> bool:
    if isinstance(default, float):
        return type(value) in (int, float)
    if isinstance(default, (list, tuple)):
        if not isinstance(value, (list, tuple)):
            return False
        if _row(default):
            return len(value) == len(default) and all(map(_fits, value, default))
        # an empty default fixes no element type
        return not default or all(_fits(item, default[0]) for item in value)
    return type(value) is type(default)


def _row(default) -> bool:
    """Whether a list is a row of fields, words and numbers, and not many values of one kind."""
    return len({isinstance(item, str) for item in default}) > 1


def _like(value, default):
    """The value in the type of the default (list or tuple, int or float): equal values then hash equally."""
    if isinstance(default, (list, tuple)) and _row(default):
        return type(default)(map(_like, value, default))
    if isinstance(default, (list, tuple)):
        return type(default)(_like(item, default[0]) if default else item for item in value)
    return float(value) if isinstance(default, float) else value


def _kind(value) -> str:
    inner = f" of {_kind(value[0])}" if isinstance(value, (list, tuple)) and value else ""
    return type(value).__name__ + inner


def with_outputs(source: NotebookNode, executed: NotebookNode, stage: str) -> NotebookNode:
    """The built notebook with the outputs of a run, cleaned of all that differs from run to run.

    Raises:
        ValueError: the run is of another text.
    """
    ran = [cell for cell in executed.cells if "injected-parameters" not in tags(cell)]
    if [cell.source for cell in ran] != [cell.source for cell in source.cells]:
        raise ValueError(f"{stage}: the executed run is of another text; needed: make study ONLY={stage[:2]}")
    count = 0
    for cell, run in zip(source.cells, ran, strict=True):
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            kept = [_clean(output, f"{stage}, cell {count}") for output in run.outputs]
            cell.outputs = [_numbered(output, count) for output in kept if output is not None]
    return source


def _numbered(output: NotebookNode, count: int) -> NotebookNode:
    if output.output_type == "execute_result":
        output.execution_count = count
    return output


def _clean(output: NotebookNode, where: str) -> NotebookNode | None:
    """One output without paths of this machine; None for progress bars and warnings (standard error)."""
    import nbformat

    if output.output_type == "stream":
        text = _neutral(output.text)
        return None if output.name == "stderr" else nbformat.v4.new_output("stream", text=text)
    if output.output_type == "error":
        raise ValueError(f"{where}: the run failed with {output.ename}; only whole runs are published")
    data = {kind: output.data[kind] for kind in KEPT_TYPES if kind in output.data}
    for kind, value in data.items():
        data[kind] = _small_png(value, where) if kind == "image/png" else _neutral(value)
    return nbformat.v4.new_output(output.output_type, data=data) if data else None


def _neutral(text: str | list[str]) -> str:
    """Text without absolute paths and object addresses, of bounded length."""
    text = text if isinstance(text, str) else "".join(text)
    for folder, name in ((paths.DATA, "data"), (paths.ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "\n... (cut)\n"


def _small_png(data: str, where: str) -> str:
    """The picture in at most PNG_LIMIT_BYTES: as it is, else with 256 colours."""
    from PIL import Image

    raw = base64.b64decode(data)
    if len(raw) > PNG_LIMIT_BYTES:
        buffer = io.BytesIO()
        Image.open(io.BytesIO(raw)).convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
        raw = buffer.getvalue()
    if len(raw) > PNG_LIMIT_BYTES:
        raise ValueError(f"{where}: a picture of {len(raw)} bytes; needed: {PNG_LIMIT_BYTES} (lower its dpi)")
    return base64.b64encode(raw).decode() + "\n"


def inputs(notebook: NotebookNode) -> list[tuple]:
    """What must be equal between text and pair: type, source, tags and id of each cell."""
    return [(cell.cell_type, cell.source, tags(cell), cell.get("id")) for cell in notebook.cells]


def keep_outputs(source: NotebookNode, old: NotebookNode) -> NotebookNode:
    """The built notebook with the outputs that `old` holds for cells that are still the same."""
    known = {cell.get("id"): cell for cell in old.cells if cell.cell_type == "code"}
    for cell in source.cells:
        if cell.cell_type == "code" and cell.id in known and known[cell.id].source == cell.source:
            cell.outputs = known[cell.id].outputs
            cell.execution_count = known[cell.id].execution_count
    return source


def write(notebook: NotebookNode, path: Path) -> None:
    """Write an `.ipynb` atomically; the same notebook gives the same bytes."""
    import nbformat

    nbformat.validate(notebook)
    manifest.write_text(path, nbformat.writes(notebook) + "\n")


def read(path: Path) -> NotebookNode:
    """An `.ipynb`.

    Raises:
        ValueError: the file is truncated or no notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        what = type(error).__name__
        raise ValueError(f"{path}: not a whole notebook ({what}); remove it and run again") from None
