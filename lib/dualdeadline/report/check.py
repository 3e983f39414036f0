"""What must hold of the paper: provenance, defined commands, fresh figures, no typed results."""

from __future__ import annotations

import re

from dualdeadline import paths
from dualdeadline.report import paper

# Digits that are part of a name, not results: hypotheses, models, data sets, formats.
NAMES = re.compile(r"\bH\d\b|OLMoE-1B-7B[\w-]*|GSM8K|H200|PowerInfer-2|bf16|float32|top-\$p\$")
# Commands whose arguments are keys, lengths or file names.
KEYED = re.compile(
    r"\\(?:cite[a-z]*|ref|label|input|bibliography\w*|begin|end|study|includegraphics)"
    r"(?:\[[^\]]*\])*\{[^{}]*\}"
)
MATH = re.compile(r"\\begin\{equation\*?\}.*?\\end\{equation\*?\}|\$[^$]*\$", re.DOTALL)


def body(tex: str) -> str:
    """The document between begin and end, comments removed."""
    inner = tex.split(r"\begin{document}", 1)[1].split(r"\end{document}", 1)[0]
    return re.sub(r"(?<!\\)%.*", "", inner)


def typed_numbers(tex: str) -> list[str]:
    """Words of the prose that hold a digit and are no name: numbers that should be commands."""
    prose = NAMES.sub(" ", KEYED.sub(" ", MATH.sub(" ", body(tex))))
    return [word for word in prose.split() if re.search(r"\d", word)]


def commands(tex: str) -> set[str]:
    r"""Commands of our own that `tex` uses: those with a capital letter first, see `latex.macro`."""
    return set(re.findall(r"\\([A-Z][A-Za-z]+)", body(tex)))


def defined(tex: str) -> set[str]:
    """Commands that a generated file defines."""
    return set(re.findall(r"\\newcommand\{\\([A-Za-z]+)\}", tex))


def shown_figures(tex: str) -> list[str]:
    r"""Names of the figures that `tex` shows by `\study`."""
    return re.findall(r"\\study(?:\[[^\]]*\])?\{([^{}]+)\}", body(tex))


def problems(workspace: paths.Workspace) -> list[str]:
    """Everything wrong with the paper of this workspace, in words; empty when nothing is."""
    tex = (paths.PAPER / "main.tex").read_text(encoding="utf-8")
    generated = {
        name: (workspace.generated / name).read_text(encoding="utf-8")
        for name in ("tables.tex", "numbers.tex")
    }
    found = [f"main.tex: {word!r} is typed, not a command" for word in typed_numbers(tex)]
    found += [
        f"main.tex uses \\{name}, which no generated file defines"
        for name in sorted(commands(tex) - set().union(*map(defined, generated.values())))
    ]
    found += [
        f"{name}: a definition without its source" for name, text in generated.items() if _unsourced(text)
    ]
    for name in shown_figures(tex):
        png = workspace.figures / f"{name}.png"
        if not (png.exists() and png.with_suffix(".pdf").exists()):
            found.append(f"figure {name} is missing: run notebook {name[:2]}")
        elif paper.stale(png, workspace):
            found.append(f"figure {name} was drawn before its records changed: run notebook {name[:2]} again")
    return found


def _unsourced(text: str) -> bool:
    lines = text.splitlines()
    return any(
        line.startswith("\\newcommand{\\")
        and not line.startswith(r"\newcommand{\figurefolder}")
        and not before.startswith("% ")
        for before, line in zip(["", *lines], lines, strict=False)
    )


def fresh(workspace: paths.Workspace) -> dict[str, bool]:
    """For every saved figure, whether its records still say what it shows."""
    return {png.stem: not paper.stale(png, workspace) for png in sorted(workspace.figures.glob("*.png"))}
