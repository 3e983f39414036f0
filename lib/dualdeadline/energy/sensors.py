"""Counters of energy: of a GPU by NVML, of CPU packages by RAPL, or a reason why neither can be read."""

from __future__ import annotations

import ctypes
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class Nvml:
    """Total energy of one GPU since its driver was loaded, in millijoules.

    Args:
        uuid: "GPU-..." of the device; default: of the current CUDA device. library: stands in for libnvidia-ml.

    Raises:
        RuntimeError: no library, no such GPU, or a counter that it does not have.
    """

    source = "nvml"

    def __init__(self, uuid: str | None = None, library=None):
        self.nvml, self.handle = library or _library(), ctypes.c_void_p()
        self._call("nvmlInit_v2")
        found = uuid or _current_uuid()
        if found is None:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(self.handle))
        else:
            self._call("nvmlDeviceGetHandleByUUID", found.encode(), ctypes.byref(self.handle))
        self.read()

    def _call(self, name: str, *values) -> None:
        code = getattr(self.nvml, name)(*values)
        if code:
            raise RuntimeError(
                f"{name} gives {code}; needed: 0, an NVIDIA GPU with a total-energy counter (Volta or newer)"
            )

    def read(self) -> float:
        """Joules so far."""
        found = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(found))
        return found.value / 1e3

    def since(self, before: float, now: float) -> float:
        return now - before


def _library():
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise RuntimeError(f"libnvidia-ml.so.1 cannot be loaded ({error}); needed: an NVIDIA driver") from None


def _current_uuid() -> str | None:
    """NVML counts all GPUs of a machine, torch those it may see: only the id names the same one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if found is None else f"GPU-{found}".replace("GPU-GPU-", "GPU-")


class Rapl:
    """Energy of all CPU packages, in microjoules that wrap around.

    Args:
        folder: of the kernel's power capping interface.

    Raises:
        RuntimeError: no package there that may be read.
    """

    source = "rapl"

    def __init__(self, folder: Path = RAPL):
        self.zones = [zone for zone in sorted(Path(folder).glob("*-rapl:*")) if _is_package(zone)]
        if not self.zones:
            raise RuntimeError(
                f"{folder} names no CPU package; needed: a processor with RAPL and a kernel that shows it"
            )
        try:
            self.ranges = [_number(zone / "max_energy_range_uj") for zone in self.zones]
            self.read()
        except OSError as error:
            raise RuntimeError(
                f"the package's energy may not be read ({error}); needed: root, on most systems"
            ) from None

    def read(self) -> tuple[int, ...]:
        """Counters of all packages."""
        return tuple(_number(zone / "energy_uj") for zone in self.zones)

    def since(self, before: tuple[int, ...], now: tuple[int, ...]) -> float:
        """Joules between two readings less than one turn of the counter apart."""
        turns = zip(before, now, self.ranges, strict=True)
        return sum((last - first) % (most + 1) for first, last, most in turns) / 1e6


def _is_package(zone: Path) -> bool:
    name = zone / "name"
    return name.exists() and name.read_text().startswith("package")


def _number(path: Path) -> int:
    return int(path.read_text())


class NoCounter:
    """Stands where nothing can be read."""

    def __init__(self, why: str):
        self.source = f"none: {why}"

    def read(self) -> float:
        return float("nan")

    def since(self, before: float, now: float) -> float:
        return float("nan")


def counters() -> list:
    """Every counter that can be read here; where there is none, a `NoCounter` that says why."""
    found, why = [], []
    for kind in (Nvml, Rapl):
        try:
            found.append(kind())
        except RuntimeError as error:
            why.append(str(error).split("; needed")[0])
    return found or [NoCounter("; ".join(why))]
