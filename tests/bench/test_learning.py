"""`learning.py`: what a variant is, how long it trains, and what becomes of a run that fails."""

import learning
import pytest
import short_runs
from learning import Variant


def test_a_variant_is_a_name_of_the_table_or_flags_of_train():
    assert Variant.of("default") == Variant("default")
    assert Variant.of("6 iterations").flags == ("--graph-iters=6",)
    assert Variant.of("mine=graph_iters=3,lr=1e-2,shared-weights=true").flags == (
        "--graph-iters=3",
        "--lr=1e-2",
        "--shared-weights",
    )
    assert Variant.of("none=").flags == ()
    assert Variant.of("deep=graph-iters=6", ["--hidden=16"]).flags == ("--hidden=16", "--graph-iters=6")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("unheard of", "not in the table"),
        ("mine=graf-iters=3", "unknown flag --graf-iters; did you mean --graph-iters"),
        ("mine=hidden=17", "not a multiple of 16"),
        ("mine=epochs=3", "--epochs=3 is not for a variant to set"),
    ],
)
def test_a_variant_that_cannot_be_trained_is_refused_before_anything_runs(text, why, capsys):
    with pytest.raises(SystemExit):
        learning.parse([text])
    assert why in capsys.readouterr().err


def test_every_variant_of_the_table_can_be_asked_for():
    asked = learning.variants_of(learning.parse(["--hidden", "32"]))
    assert [variant.name for variant in asked] == list(learning.VARIANTS)
    assert all(variant.flags[0] == "--hidden=32" for variant in asked)


def test_epochs_come_nearest_to_the_budget():
    # The first epoch takes 5 s, each later one 4 steps of 0.5 s.
    assert learning.epochs_within(20.0, 5.0, [0.4, 0.6], 4) == 1 + 8  # 7.5 more epochs fit: 8 is as near as 7
    assert learning.epochs_within(18.5, 5.0, [0.5], 4) == 1 + 7
    assert learning.epochs_within(1.0, 5.0, [0.5], 4) == 1


class Recorded:
    """In place of `learning.Bench`: a step takes 1 s, in the first epoch 3 s; the seed 1 of `bad` fails."""

    def __init__(self, store, *rest):
        self.asked = []

    def steps_per_epoch(self, variant):
        return 2

    def records(self, variant, seed, epochs):
        if (variant.name, seed) == ("bad", 1):
            raise RuntimeError(
                "rank 0 failed:\nTraceback:\n  x()\na.b.StepFailed: the loss is not finite\nhint: less\n"
            )
        good = {"edge_auc_pooled": 0.9 + 0.01 * seed, "edge_efficiency": 0.5, "edge_purity": None, "loss": 0.3}
        records = []
        for epoch in range(epochs):
            records += 2 * [{"split": "train", "loss": 0.1, "seconds": 3.0 if epoch == 0 else 1.0}]
            records.append({"split": "val", **dict.fromkeys(good, epoch)})
        return [*records[:-1], {"split": "val", **good}]


def run(monkeypatch, tmp_path, *flags):
    monkeypatch.setattr(learning, "Bench", Recorded)
    monkeypatch.setattr(learning, "store_of", lambda options: tmp_path)

    class Store:
        def __init__(self, path):
            pass

        def events(self, split):
            return ["an event"]

    monkeypatch.setattr(learning, "EventStore", Store)
    return learning.main([*flags, "--results", str(tmp_path / "lines.jsonl"), "--width", "200"])


def test_all_seeds_of_a_variant_take_the_steps_that_fit_and_the_last_validation_counts(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "default", "bad=lr=9", "--budget", "20", "--seeds", "0", "1", "2") == 1
    rows, (table,) = short_runs.lines(tmp_path)
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (name, seed) for seed in (0, 1, 2) for name in ("default", "bad")
    ]
    good = [row for row in rows if row["problem"] is None]
    assert {row["steps"] for row in good} == {16}, "6 s of the first epoch and 7 epochs of 2 s"
    assert {row["seconds"] for row in good} == {20.0}
    assert [row["edge_auc_pooled"] for row in rows if row["variant"] == "default"] == [0.9, 0.91, 0.92]
    (failed,) = (row for row in rows if row["problem"] is not None)
    assert failed["problem"] == "a.b.StepFailed: the loss is not finite"
    cells = {line[0]: dict(zip(table["headings"], line)) for line in table["cells"]}
    assert (cells["default"]["runs"], cells["bad"]["runs"]) == ("3 of 3", "2 of 3")
    assert cells["default"]["AUC"] == "0.9100 ±0.0100"
    assert cells["default"]["purity"] == "-"
    assert "OFF ITS BUDGET" not in capsys.readouterr().out


def test_a_run_that_took_longer_than_its_budget_is_named(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "default", "--budget", "5", "--seeds", "0") == 0
    assert "2 steps in 6.0 s, +20% OFF ITS BUDGET" in capsys.readouterr().out


def test_equal_steps_are_whole_epochs(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path, "default", "--steps", "5", "--seeds", "0") == 0
    assert [row["steps"] for row in short_runs.lines(tmp_path)[0]] == [6]
