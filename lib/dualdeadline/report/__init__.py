"""From records to figures, tables, number macros and README blocks.

    style(), colour(name), label(name)    how everything looks
    curves(rows, x), title(rows, text)    the usual plot, with bands where rows have an interval
    save(fig, name, workspace, rows)      PNG for readers, PDF for the paper, both with their provenance
    table(frame, name, caption, workspace)   a frame for display in a notebook, with its caption
    value(median, low, high), verdict(low, high)                    text
    published.show(name, workspace)       a published table, exactly as the paper has it
    paper.write(workspace), readme.fill(workspace)   everything that LaTeX and README include

There is one path: notebooks write records, then draw from records; the paper, README and the notebook
12_paper take each table from the same function in `published.TABLES`.
"""

from dualdeadline.report import published
from dualdeadline.report.figures import curves, provenance_line, save, title
from dualdeadline.report.look import colour, label, line, palette, style
from dualdeadline.report.tables import rows_of, table
from dualdeadline.report.text import OPEN, count, value, verdict

__all__ = [
    "OPEN",
    "colour",
    "count",
    "curves",
    "label",
    "line",
    "palette",
    "provenance_line",
    "published",
    "rows_of",
    "save",
    "style",
    "table",
    "title",
    "value",
    "verdict",
]
