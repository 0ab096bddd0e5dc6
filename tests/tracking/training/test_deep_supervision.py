"""Training with logits after every iteration: the loss of a step, and one hash on any number of ranks."""

import invariance
import pytest
import watched
from marks import slow
from torch.nn import functional as F

from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.sampler import samples_of

TOGETHER = {
    "nothing else": {},
    "what saves": {"recompute_every": 2, "shared_weights": True, "threads": 2},
    "what changes bits": {
        **{"model": "interaction-node-first", "precision": "bf16", "dropout": 0.3, "aggregate": "mean"},
        **{"residual": False, "activation": "silu", "events_per_step": 2, "clip": 0.5},
    },
}

ALONE = {
    "nothing else": {},
    "node first": {"model": "interaction-node-first"},
    "float64": {"dtype": "float64"},
    "bf16": {"precision": "bf16"},
    "dropout": {"dropout": 0.3},
    "recompute": {"recompute_every": 2},
    "shared weights": {"shared_weights": True},
    "means": {"aggregate": "mean"},
    "states replaced": {"residual": False},
    "silu": {"activation": "silu"},
    "threads": {"threads": 2},
    "several events a step": {"events_per_step": 2, "clip": 0.5},
}


def _results(world, store, out, flags):
    return invariance.results(world, store, out, {"graph_iters": 3, "max_steps": 3, "readouts": "all", **flags})


WAYS = [
    *(pytest.param(flags, (1, 3), id=name) for name, flags in TOGETHER.items()),
    *(slow(flags, (1, 2, 3), id=f"{name}, alone") for name, flags in ALONE.items()),
]


@pytest.mark.parametrize(("flags", "numbers"), WAYS)
def test_a_few_steps_leave_the_same_on_any_number_of_ranks(store, tmp_path, flags, numbers):
    found = [result for ranks in numbers for result in run_ranks(_results, ranks, store, tmp_path / "run", flags)]
    for what in ("steps", "parameters", "scores"):
        assert len({result[what] for result in found}) == 1, what
    assert len({str(result["checkpoint"]) for result in found if result["checkpoint"]}) == 1


def test_what_is_to_change_the_answer_does_and_what_only_saves_does_not(store, tmp_path):
    def parameters(**flags):
        return run_ranks(_results, 1, store, tmp_path / "run", flags)[0]["parameters"]

    alone = parameters()
    assert parameters(readouts="last") != alone
    assert parameters(recompute_every=2) == parameters(threads=2) == alone


def _first_step(world, store, model):
    """Records of an evaluation and of a step of an event, and the loss of each readout before it."""
    trainer = watched.trainer_of(store, world, model, graph_iters=3, readouts="all")
    samples = samples_of(EventStore(store).events("train"), None)[:1]
    part = trainer.loader.load(samples[0])
    z, label, weights = trainer.model(part.graph, part.halo, 0).detach(), part.graph.label, part.weights
    assert z.shape == (3, part.graph.num_edges)
    of_readouts = [
        float(F.binary_cross_entropy_with_logits(row, label.double(), weights.double(), reduction="sum"))
        for row in z.double()
    ]
    of_readouts = [loss / float(weights.sum()) for loss in of_readouts]
    return trainer.evaluate(samples, 0), trainer.step(samples, 0), of_readouts


@pytest.mark.parametrize("model", ["interaction", "interaction-node-first"])
def test_a_step_learns_from_the_mean_of_all_readouts_and_is_judged_by_the_last(store, model):
    ((evaluated, tasks, of_readouts),) = run_ranks(_first_step, 1, store, model)
    assert tasks["loss"] == pytest.approx(sum(of_readouts) / 3, rel=1e-12)
    assert evaluated["loss"] == pytest.approx(of_readouts[-1], rel=1e-12)
    assert abs(evaluated["loss"] - tasks["loss"]) > 1e-3
    for ratio in ("edge_efficiency", "edge_purity", "edge_auc_pooled"):
        assert tasks[ratio] == evaluated[ratio]
