"""Devices that an event takes: fewer of larger ones, and more for larger networks."""

import devices
from random_store import write_random_store


def test_a_row_for_each_network_has_the_devices_that_it_takes(tmp_path, monkeypatch, capsys):
    store = write_random_store(tmp_path / "store")
    monkeypatch.setattr(devices, "DEVICES", (0.0001, 1))
    assert devices.main(["--store", str(store), "--networks", "16x1", "32x8", "--most-ranks", "4"]) == 0
    *_, small, large = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (small[0], large[0]) == ("16x1", "32x8")
    assert small[3] == large[3] == "-", "no number of ranks fits into a tenth of a MiB"
    assert small[-1] == large[-1] == "1"
