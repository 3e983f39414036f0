"""Typeset text, tables and macros for the paper, each with a line that says what made it."""

from __future__ import annotations

import re

import pandas as pd

from dualdeadline.report.tables import Table

ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "×": r"$\times$",
    "<": "$<$",
    ">": "$>$",
}
DIGITS = "Zero One Two Three Four Five Six Seven Eight Nine".split()


def escape(text) -> str:
    """Plain text as LaTeX."""
    return "".join(ESCAPES.get(letter, letter) for letter in str(text))


def macro(name: str) -> str:
    r"""`stall_h1` as `StallHOne`: LaTeX allows letters only in a command's name."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    joined = "".join(word[:1].upper() + word[1:] for word in words)
    return re.sub(r"\d", lambda digit: DIGITS[int(digit[0])], joined)


def made_by(rows: pd.DataFrame) -> str:
    """Notebook, records file, machine, commit and kind of some record rows, as plain text.

    Raises:
        ValueError: no rows, so nothing could vouch for the number.
    """
    if not len(rows):
        raise ValueError("a number without record rows has no provenance")
    parts = []
    for stage, part in rows.groupby("stage"):
        commits = [
            commit[:10] + ("+" if dirty == "true" else "")
            for commit, dirty in sorted(set(zip(part["commit"], part["dirty"], strict=True)))
        ]
        kinds = "/".join(sorted(set(part["kind"])))
        parts.append(
            f"notebooks/{stage}.py, data_manifests/records/{stage}.csv ({kinds}), "
            f"machine {', '.join(sorted(set(part['machine'])))}, commit {', '.join(commits)}"
        )
    return "; ".join(parts)


def define(name: str, body: str, source: str) -> str:
    r"""A `\newcommand` after a comment that names its source."""
    return f"% {source}\n\\newcommand{{\\{macro(name)}}}{{{body}}}\n"


def table(finished: Table) -> str:
    r"""`\TableName`: a booktabs float with caption, label `tab:name` and provenance note."""
    frame, source = finished.frame, made_by(finished.rows)
    environment = "table*" if finished.wide else "table"
    lines = [" & ".join(escape(cell) for cell in row) + r" \\" for row in frame.itertuples(index=False)]
    head = " & ".join(escape(cell) for cell in frame.columns) + r" \\"
    body = "\n".join(
        [
            "%",
            rf"\begin{{{environment}}}[tbp]\centering",
            rf"\caption{{{escape(finished.caption)}}}",
            rf"\label{{tab:{finished.name}}}",
            rf"\footnotesize\setlength{{\tabcolsep}}{{{finished.gap_pt}pt}}",
            rf"\begin{{tabular}}{{{finished.align or 'l' + 'r' * (frame.shape[1] - 1)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\madeby{{{escape(source)}}}",
            rf"\end{{{environment}}}",
        ]
    )
    return define(f"table_{finished.name}", body, source)
