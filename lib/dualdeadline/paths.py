"""Every folder of the project, from one root.

`ROOT` is the checkout (the package is installed in editable form). `DUALDEADLINE_DATA` moves everything
that git ignores: traces, executed runs, downloads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DUALDEADLINE_DATA") or ROOT / "data").resolve()
LIB = ROOT / "lib"
PACKAGE = LIB / "dualdeadline"
PILOT = PACKAGE / "pilot"
NOTEBOOKS = ROOT / "notebooks"
PROFILES = NOTEBOOKS / "profiles"
MANIFESTS = ROOT / "data_manifests"
CORPORA = MANIFESTS / "corpora"
RECORDS = MANIFESTS / "records"
FIGURES = ROOT / "figures"
PAPER = ROOT / "paper"
TESTS = ROOT / "tests"
DOWNLOADS = DATA / "downloads"
# stages that measure on a GPU and show committed measurements without one
ON_GPU = ("06_kernels", "07_overlap", "08_wire", "09_decode", "10_tiers", "11_confirmation")
TRAINED = ("90_pilot_model",)  # stages whose notebook only reads records


@dataclass(frozen=True)
class Workspace:
    """Where one profile reads and writes.

    The study's own profiles share the committed records, figures and paper; `smoke` (tests, CI) keeps
    everything below `DATA/smoke`, so that a test run never touches a committed file.
    """

    profile: str

    @property
    def base(self) -> Path:
        """Folder of everything git ignores: traces, predictors, shards, executed runs."""
        return DATA / self.profile

    @property
    def _published(self) -> bool:
        return self.profile != "smoke"

    @property
    def records(self) -> Path:
        return RECORDS if self._published else self.base / "records"

    def record_file(self, stage: str) -> Path:
        """Where a stage's records are read. A shipped model is trained once: without rows of its own a profile
        reads the committed ones."""
        own = self.records / f"{stage}.csv"
        return RECORDS / own.name if stage in TRAINED and not own.exists() else own

    @property
    def figures(self) -> Path:
        if not self._published:
            return self.base / "figures"
        return FIGURES if self.profile == "pilot" else FIGURES / self.profile

    @property
    def generated(self) -> Path:
        if not self._published:
            return self.base / "paper" / "generated"
        return PAPER / "generated" if self.profile == "pilot" else self.base / "paper" / "generated"

    @property
    def traces(self) -> Path:
        return self.base / "traces"

    @property
    def scores(self) -> Path:
        return self.base / "scores"

    @property
    def runs(self) -> Path:
        return self.base / "runs"


def need(path: Path, stage: str) -> Path:
    """`path` if it exists, else a FileNotFoundError that names the stage that makes it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: notebook {stage} makes it (make study ONLY={stage[:2]})")
    return path
