"""Make README's blocks or the paper's tables again: `python -m dualdeadline.report readme|paper`."""

from __future__ import annotations

import argparse

from dualdeadline import paths
from dualdeadline.report import paper, readme
from dualdeadline.report.tables import Subject


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dualdeadline.report", description=__doc__)
    parser.add_argument("what", choices=("readme", "paper"))
    parser.add_argument(
        "--profile", default="pilot", choices=sorted(path.stem for path in paths.PROFILES.glob("*.yaml"))
    )
    asked = parser.parse_args()
    about = Subject(paths.Workspace(asked.profile))
    if asked.what == "readme":
        print("README.md changed" if readme.fill(about) else "README.md is up to date")
        return
    for path in paper.write(about):
        print(path)
    print(paper.build(about.workspace) or f"no latexmk here, so no PDF: {paper.INSTALL}")


if __name__ == "__main__":
    main()
