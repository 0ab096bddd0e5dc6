"""The energy of a command: counters that turn over, GPUs, and figures of the user's own."""

import sys
from types import SimpleNamespace

import energy
import pytest


def write_counters(powercap, **joules):
    """Counters of packages, in millionths, of which a part of a package must not count again."""
    for number, (name, value) in enumerate(joules.items()):
        for place in (f"intel-rapl:{number}", f"intel-rapl:{number}:0"):
            (powercap / place).mkdir(parents=True, exist_ok=True)
            (powercap / place / "name").write_text(name)
            (powercap / place / "energy_uj").write_text(f"{int(value * 1e6)}\n")
            (powercap / place / "max_energy_range_uj").write_text(f"{int(100e6)}\n")


def test_counters_of_all_packages_are_added_and_go_on_where_one_begins_anew(tmp_path):
    write_counters(tmp_path, first=10.0, second=95.0)
    joules = energy.of_processors(tmp_path)
    begin = joules()
    write_counters(tmp_path, first=14.0, second=2.0)  # the second went through its 100 J
    assert joules() - begin == pytest.approx(4.0 + 7.0)
    write_counters(tmp_path, first=15.0, second=3.0)
    assert joules() - begin == pytest.approx(5.0 + 8.0)


def test_counters_that_are_not_there_or_not_to_be_read_are_none(tmp_path):
    assert energy.of_processors(tmp_path) is None
    write_counters(tmp_path, first=1.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("no number")
    assert energy.of_processors(tmp_path) is None


def test_gpus_are_added_and_ones_that_cannot_tell_are_none(monkeypatch):
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 2500 + 1000 * handle,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert energy.of_gpus()() == 6.0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.of_gpus() is None


def test_a_command_is_charged_and_its_exit_code_kept(monkeypatch, capsys):
    monkeypatch.setattr(energy, "of_gpus", lambda: iter([5.0, 12.0]).__next__)
    monkeypatch.setattr(energy, "of_processors", lambda: None)
    assert energy.main(["--price", "3600", sys.executable, "-c", "raise SystemExit(3)"]) == 3
    out = capsys.readouterr().out
    assert " s, 7 J (NVML), " in out
    assert " at 3600 an hour" in out
    monkeypatch.setattr(energy, "of_gpus", lambda: None)
    energy.main(["--watts", "100", sys.executable, "-c", ""])
    assert "J (100 W as given)" in capsys.readouterr().out
    energy.main([sys.executable, "-c", ""])
    assert "give --watts" in capsys.readouterr().out
