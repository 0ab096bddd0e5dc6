"""Grids of one batch have one hash and DDP the same loss; predictions stand beside what was measured."""

import grid
import pytest
import short_runs


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(grid.os, "cpu_count", lambda: 2)


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_all_grids_are_measured_predicted_and_agree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid.cases, "CACHE", tmp_path / "events")
    asked = ["--sizes", "1200", "800", "--hidden", "16", "--graph-iters", "2", "--rounds", "1", "--repeats", "1"]
    assert grid.main([*asked, "--most-ranks", "4", "--results", str(tmp_path / "lines.jsonl")]) == 0
    assert "grids of domainpar: the same bits" in capsys.readouterr().out
    rows, _ = short_runs.lines(tmp_path)
    measured = {(row["ranks"], row["domain_size"]): row for row in rows if row["how"] == grid.MEASURED}
    assert set(measured) == {(1, 1), (2, 1), (2, 2)}
    assert all(row["predicted"] > 0 for row in measured.values())
    assert sum(row["chosen"] for (ranks, _), row in measured.items() if ranks == 2) == 1
    assert {row["ranks"] for row in rows if row["how"] == grid.DDP} == {1, 2}
    predicted = {(row["ranks"], row["domain_size"]) for row in rows if row["how"] == grid.PREDICTED}
    assert predicted == {(4, 1), (4, 2), (4, 4)}


def test_a_difference_of_losses_is_no_agreement(capsys):
    class Results:
        class console:
            print = staticmethod(print)

    same = {"how": grid.MEASURED, "losses": [0.5, 0.4]}
    assert grid.same_losses([same, same, {"how": grid.DDP, "losses": [0.5 + 1e-7, 0.39]}], Results)
    assert not grid.same_losses([same, {"how": grid.DDP, "losses": [0.501]}], Results)
    assert not grid.same_losses([same, {"how": grid.MEASURED, "losses": [0.5, 0.4 + 1e-9]}], Results)
    assert "DIFFERENT BITS" in capsys.readouterr().out
