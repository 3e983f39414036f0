"""Which machine a record was made on: a stable id, described in `data_manifests/machines.yaml`."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import yaml

from dualdeadline import manifest, paths


@functools.cache
def describe() -> dict:
    """CPU, cores, memory (GiB) and GPU of this machine, as far as they fix a timing."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "system": platform.system(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def machine_id() -> str:
    """Id of this machine in `machines.yaml`, or `local-` and eight hex digits of its description."""
    here = describe()
    for name, entry in known().items():
        if all(entry.get(key) == value for key, value in here.items()):
            return name
    return "local-" + manifest.sha256(repr(sorted(here.items())))[:8]


def known() -> dict[str, dict]:
    """Every described machine: id -> description; the first with `reference: true` is the published one."""
    return manifest.read_yaml("machines.yaml") if (paths.MANIFESTS / "machines.yaml").exists() else {}


def register(name: str | None = None, description: dict | None = None) -> str:
    """Add a machine (default: this one) to `machines.yaml` if it is not there yet; its id.

    Raises:
        ValueError: the id is there with another description.
    """
    name, description = name or machine_id(), description or describe()
    entries = known()
    if name not in entries:
        path = paths.MANIFESTS / "machines.yaml"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        manifest.write_text(path, text + yaml.safe_dump({name: description}, sort_keys=False))
    elif any(entries[name].get(key) != value for key, value in description.items()):
        raise ValueError(f"{name} is in machines.yaml as {entries[name]}, the rows are from {description}; "
                         "needed: another machine id")
    return name
