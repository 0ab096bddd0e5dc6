"""Sizes of layers, and spikes of the loss: named by step, event and layer, the same on every rank."""

import json

import pytest
import torch

from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training.monitor import spikes
from domainpar.tracking.training.monitor.sizes import layer_norms, layer_sizes
from domainpar.train import train


def seen(losses, norms=None):
    """The steps at which there are spikes, with their records."""
    look, found = spikes.Spikes(), {}
    for step, loss in enumerate(losses):
        layer_norms = {"first": 1.0, "last": 2.0} if norms is None else norms(step)
        if (spike := look.look(loss, layer_norms, [f"event {step}"])) is not None:
            found[step] = spike
    return found


def test_a_spike_is_a_loss_far_above_what_was_usual():
    calm = [1.0 + 0.1 * (step % 3) for step in range(30)]
    assert seen(calm) == {}
    found = seen([*calm[:20], 5.0, *calm[20:]], lambda step: {"first": 1.0, "last": 8.0 if step == 20 else 2.0})
    assert found == {20: {"loss": 5.0, "usual": 1.1, "events": ["event 20"], "layer": "last", "times": 4.0}}


def test_losses_that_fall_rise_slowly_or_always_jump_are_none():
    assert seen([2.0 * 0.95**step for step in range(60)]) == {}
    assert seen([1.02**step for step in range(60)]) == {}
    assert seen([1.0 + (step % 2) for step in range(60)]) == {}


def test_before_anything_is_usual_there_is_none():
    assert seen([1.0] * (spikes.LEAST_STEPS - 1) + [9.0]) == {}
    assert list(seen([1.0] * spikes.LEAST_STEPS + [9.0])) == [spikes.LEAST_STEPS]


def test_after_losses_of_nothing_there_is_none():
    """Steps in which no edge has a weight."""
    assert seen([0.0] * 20 + [0.5]) == {}


def test_a_layer_without_gradient_so_far_is_not_named():
    (found,) = seen([1.0] * 20 + [9.0], lambda step: {"first": 0.0 if step < 20 else 1.0}).values()
    assert (found["layer"], found["times"]) == (None, None)
    assert spikes.lines({"step": 21, "spike": found}) == [
        "spike    : step 21, loss 9, 9.0 times the usual 1, event event 20"
    ]


def test_the_line_names_step_event_and_layer():
    spike = {"loss": 2.0, "usual": 0.5, "events": list("abcd"), "layer": "head.0", "times": 7.25}
    (line,) = spikes.lines({"step": 7, "spike": spike})
    where = "event a, b, c and 1 more; the gradient of head.0 is 7.2 times its usual size"
    assert line == f"spike    : step 7, loss 2, 4.0 times the usual 0.5, {where}"
    assert spikes.lines({"step": 7}) == []


def test_a_layer_is_as_large_as_all_its_tensors_together():
    assert layer_norms(["a", "b", "a"], [3.0, 1.0, 4.0]) == {"a": 5.0, "b": 1.0}
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    layer_of = {parameter: name[0] for name, parameter in model.named_parameters()}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        model[1].weight.add_(0.5)
    sizes = layer_sizes(layer_of, before, {"1": 7.0})
    assert sizes["0"]["update"] == sizes["0"]["gradient"] == 0
    assert sizes["1"]["gradient"] == 7.0
    assert sizes["1"]["update"] == pytest.approx(0.5 * 3**0.5)
    assert sizes["0"]["parameters"] == pytest.approx(float(torch.cat([it.view(-1) for it in before[:2]]).norm()))


def _recorded(world, store, out, model):
    config = TrainConfig(out=str(out), model=model, hidden=16, graph_iters=2, epochs=2, log_every=3, overwrite=True)
    trainer = train(config, store, world).trainer
    world.transport.barrier()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    names = {name.rpartition(".")[0] for name, _ in trainer.model.layers.named_parameters()}
    return [record for record in map(json.loads, lines) if record["split"] == "train"], names


@pytest.mark.parametrize("model", ["interaction", "own_models:evolving"])
def test_a_run_records_the_sizes_of_its_layers_at_the_steps_that_are_printed(store, tmp_path, model):
    found = [run_ranks(_recorded, ranks, store, tmp_path / "run", model)[0] for ranks in (1, 2)]
    for records, names in found:
        assert [record["step"] for record in records if "layers" in record] == [1, 3, 6]
        for record in records:
            for sizes in record.get("layers", {}).values():
                assert min(sizes.values()) > 0
            assert record.get("layers", dict.fromkeys(names)).keys() == names
            if "layers" in record:
                total = sum(sizes["gradient"] ** 2 for sizes in record["layers"].values()) ** 0.5
                assert total == pytest.approx(record["grad_norm"], rel=1e-5)
    if model == "interaction":
        assert [record.get("layers") for record in found[0][0]] == [record.get("layers") for record in found[1][0]]


def test_a_spike_of_a_run_is_recorded_and_printed(store, tmp_path, monkeypatch, capsys):
    for name, value in (("LEAST_STEPS", 2), ("TIMES", 0.0), ("_spread", lambda losses: -1e9)):
        monkeypatch.setattr(spikes, name, value)
    records, names = run_ranks(_recorded, 2, store, tmp_path / "run", "interaction")[0]
    spiky = [record for record in records if "spike" in record]
    assert [record["step"] for record in spiky] == [3, 4, 5, 6]
    assert all(record["spike"]["layer"] in names and record["spike"]["times"] > 0 for record in spiky)
    assert capsys.readouterr().out.count("spike    : step ") == 4
