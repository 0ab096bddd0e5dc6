import os

import pytest
import scaling
import short_runs
from marks import slow


@pytest.mark.parametrize("kinds", [["strong"], slow(["strong", "weak"])], ids=" ".join)
def test_scaling_says_what_is_measured_and_what_is_predicted(kinds, tmp_path_factory, tmp_path):
    flags = "--case tiny --weak-hits 2000 --ranks 1 --parts 2 4 --weak-parts 4 --hidden 16 --graph-iters 2"
    short = "--rounds 1 --repeats 1 --transport threads"
    scaling.main([*flags.split(), *short.split(), "--kinds", *kinds, *short_runs.flags(tmp_path_factory, tmp_path)])
    rows, tables = short_runs.lines(tmp_path)
    strong, weak = ([row for row in rows if row["kind"] == kind] for kind in scaling.KINDS)
    assert [(row["how"], row["ranks"]) for row in strong] == [("measured", 1), ("PREDICTED", 2), ("PREDICTED", 4)]
    for row in (strong[0], *weak[:1]):
        assert row["efficiency"]["median"] == row["speed_up"]["median"] == 1
        assert row["ghost_ratio"] == 0
        assert row["edge_work"] == 1
        assert row["error"] == pytest.approx(row["predicted"] / row["seconds"]["median"] - 1)
    assert all(row["predicted"] > 0 for row in rows)
    assert strong[2]["ghost_ratio"] > strong[1]["ghost_ratio"] > 0
    assert [line[1] for line in tables[0]["cells"]] == ["measured", "PREDICTED", "PREDICTED"]
    if "weak" in kinds:
        assert [(row["how"], row["ranks"]) for row in weak] == [("measured", 1), ("PREDICTED", 4)]
        assert 2 < weak[1]["edges"] / weak[0]["edges"] < 6  # small events do not grow quite like the square
    assert [line[0] for line in tables[1]["cells"]] == ["1"]


def test_more_ranks_than_cores_are_not_measured(capsys):
    with pytest.raises(SystemExit):
        scaling.parse(["--ranks", str(os.cpu_count() + 1)])
    assert "would measure waiting" in capsys.readouterr().err


def test_edges_of_weak_scaling_grow_like_the_square_of_hits():
    assert [scaling.weak_hits(30_000, ranks) for ranks in (1, 4, 16)] == [30_000, 60_000, 120_000]
