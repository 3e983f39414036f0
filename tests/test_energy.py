"""Energy counters against made-up ones whose joules are known, and what is said where there is none."""

import ctypes
import math

import pandas as pd
import pytest

from dualdeadline import energy, record
from dualdeadline.energy import meter, sensors


class Clock:
    """Time that passes when somebody sleeps or works, and a counter of so many watts."""

    source = "made up"

    def __init__(self, monkeypatch, idle=40.0):
        self.seconds, self.joules, self.watts = 100.0, 7.0, idle
        monkeypatch.setattr(meter.time, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(meter.time, "sleep", self.passes)

    def passes(self, seconds, watts=None):
        self.seconds += seconds
        self.joules += seconds * (self.watts if watts is None else watts)

    def read(self):
        return self.joules

    def since(self, before, now):
        return now - before


def test_a_meter_counts_what_runs_inside_and_shows_idle(monkeypatch):
    clock = Clock(monkeypatch)
    with energy.Meter(clock, idle_s=2.0) as found:
        clock.passes(4.0, 100.0)
    clock.passes(9.0, 1000.0)  # after it
    assert (found.joules, found.seconds, found.idle_watts) == (400.0, 4.0, 40.0)
    assert found.net_joules == 400.0 - 4.0 * 40.0 and found.source == "made up"
    with energy.Meter(clock, idle_s=0) as found:
        clock.passes(1.0, 50.0)
    assert found.joules == 50.0 and math.isnan(found.idle_watts) and math.isnan(found.net_joules)


def test_joules_per_token(monkeypatch):
    clock, calls = Clock(monkeypatch), []
    found = energy.per_token(lambda: calls.append(clock.passes(0.3, 90.0)), tokens=5, seconds=2.0, idle_s=1.0,
                             found=[clock, energy.NoCounter("it is dark")])
    assert len(calls) == 7  # 6 are 1.8 s
    values = found[found.source == "made up"].set_index("metric").value
    assert values["joules_per_token"] == pytest.approx(0.3 * 90 / 5)
    assert values["net_joules_per_token"] == pytest.approx(0.3 * (90 - 40) / 5)
    assert values["watts"] == pytest.approx(90) and values["idle_watts"] == pytest.approx(40)
    assert set(found.tokens) == {35} and found.seconds.tolist() == pytest.approx([2.1] * 5)
    dark = found[found.source == "none: it is dark"]
    assert len(dark) == 1 and math.isnan(dark.value.item())
    with pytest.raises(ValueError, match="tokens is 0"):
        energy.per_token(lambda: None, 0, found=[clock])
    with pytest.raises(ValueError, match="seconds 0.1"):
        energy.per_token(lambda: None, 1, seconds=0.1, found=[clock])


def test_record_rows_keep_the_reason(tmp_path):
    found = energy.per_token(lambda: None, 1, seconds=energy.STEP_S, found=[energy.NoCounter("no driver")])
    (row,) = energy.records(found, "chosen", {"slots": 32})
    assert row["config"] == {"slots": 32, "source": "none: no driver"} and row["metric"] == "joules_per_token"
    recorder = record.Recorder.__new__(record.Recorder)
    recorder.common, recorder.rows = {}, []
    recorder.add(**{key: value for key, value in row.items() if key != "config"}, **row["config"])
    assert recorder.rows[0]["median"] in ("", None) or pd.isna(recorder.rows[0]["median"])


def package(folder, number, name, energy_uj, most):
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir()
    for key, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", most)):
        (zone / key).write_text(f"{value}\n")
    return zone


def test_rapl_adds_packages_and_survives_a_turn_of_the_counter(tmp_path):
    first = package(tmp_path, 0, "package-0", 999_000, 999_999)
    second = package(tmp_path, 1, "package-1", 5_000_000, 10**9)
    package(tmp_path, "0:0", "dram", 123, 10**9)
    counter = energy.Rapl(tmp_path)
    before = counter.read()
    (first / "energy_uj").write_text("500000")  # 1,000 to the end of the range, then 500,000
    (second / "energy_uj").write_text("7000000")
    assert counter.since(before, counter.read()) == pytest.approx((501_000 + 2_000_000) / 1e6)


def test_rapl_that_is_not_there_or_not_ours(tmp_path):
    with pytest.raises(RuntimeError, match="names no CPU package"):
        energy.Rapl(tmp_path)
    zone = package(tmp_path, 0, "package-0", 1, 10)
    (zone / "energy_uj").unlink()
    with pytest.raises(RuntimeError, match="may not be read"):
        energy.Rapl(tmp_path)


class Library:
    """libnvidia-ml with one GPU, or with an error in one of its functions."""

    def __init__(self, error="", code=3):
        self.millijoules, self.asked = 5_000_000, []
        for name in ("nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByIndex_v2",
                     "nvmlDeviceGetTotalEnergyConsumption"):
            setattr(self, name, self._function(name, code if name == error else 0))

    def _function(self, name, code):
        def call(*values):
            self.asked.append((name, values))
            if name == "nvmlDeviceGetTotalEnergyConsumption" and not code:
                ctypes.cast(values[1], ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
            return code

        return call


def test_nvml_reads_joules_of_the_gpu_with_that_id():
    library = Library()
    counter = energy.Nvml("GPU-1234", library)
    before = counter.read()
    library.millijoules += 2_500
    assert counter.since(before, counter.read()) == 2.5 and before == 5_000.0
    assert ("nvmlDeviceGetHandleByUUID", b"GPU-1234") in [(name, values[0]) for name, values in library.asked if values]


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_nvml_says_what_failed(name):
    with pytest.raises(RuntimeError, match=f"{name} gives 3; needed"):
        energy.Nvml("GPU-1", Library(name))


def test_counters_of_this_machine_are_readable_or_say_why(monkeypatch, tmp_path):
    for counter in energy.counters():
        if counter.source.startswith("none"):
            assert len(counter.source) > len("none: ") and math.isnan(counter.read())
        else:
            assert counter.since(counter.read(), counter.read()) >= 0
    monkeypatch.setattr(sensors, "Nvml", lambda: (_ for _ in ()).throw(RuntimeError("no driver; needed: one")))
    monkeypatch.setattr(sensors, "Rapl", lambda: (_ for _ in ()).throw(RuntimeError("no packages; needed: some")))
    (only,) = energy.counters()
    assert only.source == "none: no driver; no packages"
    with energy.Meter() as found:
        pass
    assert math.isnan(found.joules) and found.seconds >= 0 and found.source == only.source


def test_joules_per_megabyte():
    before = {"bytes_demand": 10, "bytes_useful": 5, "bytes_wasted": 1}
    after = {"bytes_demand": 3_000_010, "bytes_useful": 1_000_005, "bytes_wasted": 500_001}
    found = energy.per_megabyte(8.0, before, after)
    assert found == {"joules_per_useful_mb": 2.0, "joules_per_wasted_mb": 16.0}
    assert energy.per_megabyte(8.0, before, before) == {"joules_per_useful_mb": None, "joules_per_wasted_mb": None}


def test_the_ratio_of_two_is_measured_in_turn(monkeypatch):
    clock, order = Clock(monkeypatch), []

    def spends(name, seconds, watts):
        return lambda: (order.append(name), clock.passes(seconds, watts))

    calls = {"chosen": spends("chosen", 0.5, 60.0), "demand_pipelined": spends("demand_pipelined", 0.4, 100.0)}
    found = energy.compare(calls, tokens=2, seconds=10.0, slice_s=1.0, seed=3, counter=clock)
    assert found.groupby("name").seconds.sum().min() >= 10 and found.joules.sum() == pytest.approx(clock.joules - 7)
    assert len({name for name, *_ in found[["name", "round"]].itertuples(index=False)}) == 2
    firsts = found.groupby("round").name.first()
    assert set(firsts) == set(calls) and order.count("chosen") * 2 == found[found.name == "chosen"].tokens.sum()
    row = energy.ratio(found, "chosen", "demand_pipelined")
    assert row["variant"] == "chosen-demand_pipelined" and row["median"] == pytest.approx(0.5 * 60 / (0.4 * 100))
    assert row["low"] <= row["median"] <= row["high"] and row["config"] == {"source": "made up"}
    with pytest.raises(ValueError, match="slice_s 0.01"):
        energy.compare(calls, 1, slice_s=0.01, counter=clock)
