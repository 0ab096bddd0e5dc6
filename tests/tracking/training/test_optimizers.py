"""Optimisers: their formulas, one hash on any number of ranks, and a run that goes on where it was stopped."""

import json
import pickle
import re

import invariance
import numpy as np
import pytest
import torch
import yaml
from marks import slow
from torch import nn

from domainpar import train as train_command
from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem
from domainpar.nn.optimizers import OPTIMIZERS, optimizer_name
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.command_line import config_of_run, parse
from domainpar.tracking.config import ConfigError, TrainConfig
from domainpar.tracking.display.run_facts import command
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.training.optimizer import make_optimizer
from domainpar.tracking.training.summary import resume_command
from domainpar.train import train
from examples import optimizers

STEPS = 4
IN_EXAMPLES = {"examples.optimizers:Lars": optimizers.Lars, "examples.optimizers:Lamb": optimizers.Lamb}


def made(name, model, **flags):
    return make_optimizer(TrainConfig(optimizer=name, **flags), model)


@pytest.mark.parametrize(("name", "kind"), [*OPTIMIZERS.items(), *IN_EXAMPLES.items()])
def test_optimisers_can_be_copied_and_have_their_names(name, kind):
    copied = pickle.loads(pickle.dumps(made(name, layer()[0], lr=0.25, weight_decay=0.5)))
    assert type(copied) is kind
    assert copied.param_groups[0]["lr"] == 0.25
    assert copied.param_groups[0]["weight_decay"] == 0.5
    assert optimizer_name(copied) == name


def test_optimisers_of_torch_have_the_names_of_ours():
    parameters = [nn.Parameter(torch.zeros(2))]
    made = [kind(parameters) for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RAdam)]
    assert [optimizer_name(it) for it in made] == ["adamw", "adam", "sgd", "torch.optim.radam:RAdam"]


def layer():
    """A layer with a matrix, a vector and a matrix of zeros, and the gradients of some steps."""
    layer = nn.Module()
    layer.matrix = nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3).sin() + 0.2)
    layer.vector = nn.Parameter(torch.tensor([0.3, -0.1], dtype=torch.float64))
    layer.zeros = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    gradients = [
        [torch.cos(torch.arange(it.numel(), dtype=torch.float64).view_as(it) + 7 * step) for it in layer.parameters()]
        for step in range(STEPS)
    ]
    return layer, gradients


def lars(w, g, state, lr, momentum, weight_decay):
    rate = lr
    if w.ndim > 1:
        size, of_step = np.linalg.norm(w), np.linalg.norm(g) + weight_decay * np.linalg.norm(w)
        rate = lr * 0.001 * (size / of_step if size > 0 else 1)
        g = g + weight_decay * w
    state["v"] = momentum * state.get("v", 0) + rate * g
    return w - state["v"]


def lamb(w, g, state, lr, betas, weight_decay):
    state["t"] = state.get("t", 0) + 1
    for power, (name, beta) in enumerate(zip("mv", betas), start=1):
        state[name] = beta * state.get(name, 0) + (1 - beta) * g**power
    m, v = (state[name] / (1 - beta ** state["t"]) for name, beta in zip("mv", betas))
    direction = m / (np.sqrt(v) + 1e-6)
    if w.ndim == 1:
        return w - lr * direction
    direction = direction + weight_decay * w
    size = np.linalg.norm(w)
    return w - lr * (size / np.linalg.norm(direction) if size > 0 else 1) * direction


FORMULAS = {
    "Lars": (lars, {"lr": 2.0, "momentum": 0.8, "weight_decay": 0.1}),
    "Lamb": (lamb, {"lr": 0.1, "betas": (0.7, 0.9), "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_layerwise_optimisers_are_their_formulas(name):
    formula, options = FORMULAS[name]
    model, gradients = layer()
    optimizer = getattr(optimizers, name)(model.parameters(), **options)
    expected = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    states = [{} for _ in expected]
    for of_step in gradients:
        for parameter, gradient in zip(model.parameters(), of_step):
            parameter.grad = gradient.clone()
        optimizer.step()
        expected = [formula(w, g.numpy(), s, **options) for w, g, s in zip(expected, of_step, states)]
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-12)


TORCHS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


@pytest.mark.parametrize("name", TORCHS)
def test_the_others_are_those_of_torch(name):
    options = {"momentum": 0.9} if name == "sgd" else {}
    common, outcomes = {"lr": 0.1, "weight_decay": 0.1}, []
    for ours in (True, False):
        model, gradients = layer()
        plain = TORCHS[name](model.parameters(), **common, **options)
        optimizer = made(name, model, **common) if ours else plain
        for of_step in gradients:
            for parameter, gradient in zip(model.parameters(), of_step):
                parameter.grad = gradient.clone()
            optimizer.step()
        outcomes.append(list(model.parameters()))
    assert all(map(torch.equal, *outcomes))


def plain(params, lr):
    """Takes no weight decay."""
    return torch.optim.SGD(params, lr=lr)


class Counts(torch.optim.SGD):
    """Counts its steps where a checkpoint does not look."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)


class CountsInNumbers(torch.optim.SGD):
    """Counts its steps in a number, not in a tensor."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["times"] = 1
        super().step(closure)


class CountsForAll(torch.optim.SGD):
    """Counts its steps once for all parameters."""

    def step(self, closure=None):
        self.state["all"] = {"steps": torch.ones(())}
        super().step(closure)


def test_an_optimiser_of_ones_own_gets_weight_decay_if_it_takes_it():
    for name in ("torch.optim:RAdam", "examples.optimizers:Lars"):
        group = made(name, layer()[0], lr=0.25, weight_decay=0.5).param_groups[0]
        assert [group[key] for key in ("lr", "weight_decay")] == [0.25, 0.5]
    assert made(f"{__name__}:plain", layer()[0]).param_groups[0]["weight_decay"] == 0
    with pytest.raises(Problem, match=f"--weight-decay 0.5 .*with --optimizer {__name__}:plain, which"):
        made(f"{__name__}:plain", layer()[0], weight_decay=0.5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Mine", "'no_such_module:Mine' .*ModuleNotFoundError"),
        ("examples.optimizers:Larry", "'examples.optimizers:Larry' .*AttributeError"),
        ("torch.nn:Identity", "'torch.nn:Identity' .*torch.optim.Optimizer"),
        ("torch.nn:Linear", "TypeError: .*lr, weight_decay"),
        ("torch.optim:LBFGS", "'torch.optim:LBFGS' .*TypeError: .*closure"),
        ("Counts", "keeps steps .*checkpoint"),
        ("CountsInNumbers", "keeps times from step to step"),
        ("CountsForAll", "keeps all from step to step"),
    ],
)
def test_what_cannot_be_an_optimiser_is_refused_with_its_name(name, words):
    with pytest.raises(ValueError, match=words):
        made(name if ":" in name else f"{__name__}:{name}", layer()[0])


RUNS = {
    "lars": {"optimizer": "examples.optimizers:Lars", "lr": 3.0, "clip": 0.5},
    "lamb": {"optimizer": "examples.optimizers:Lamb", "lr": 0.02, "events_per_step": 2},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize("name", ["lamb", slow("lars"), slow("sgd")])
def test_any_number_of_ranks_has_one_hash(store, tmp_path, name):
    found = [
        result
        for ranks in (1, 3)
        for result in run_ranks(invariance.results, ranks, store, tmp_path / "run", RUNS[name])
    ]
    for what in ("steps", "parameters", "scores"):
        assert len({result[what] for result in found}) == 1, what


def trained(store, out, **flags):
    config = TrainConfig(**{**invariance.SMALL, "overwrite": False, "store": str(store), "out": str(out), **flags})
    return train(config, store, World.alone())


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(store, tmp_path, name):
    flags = RUNS[name] | {"epochs": 1}
    whole = trained(store, tmp_path / "whole", **flags)
    trained(store, tmp_path / "run", **flags, max_steps=1)
    resumed = trained(store, tmp_path / "run", **flags, resume=True)
    assert invariance.parameters_of(resumed) == invariance.parameters_of(whole)


def test_a_checkpoint_of_another_optimiser_is_refused(store, tmp_path):
    trained(store, tmp_path / "run", **RUNS["lamb"], max_steps=1)
    lamb = "examples.optimizers:Lamb"
    for name in ("adam", "sgd", "torch.optim.adamax:Adamax"):  # one keeps what has the same names
        with pytest.raises(Refused, match=f"left by {lamb}, .* to {name}") as refused:
            trained(store, tmp_path / "run", optimizer=name, resume=True)
        assert refused.value.hint.startswith(f"give --optimizer {lamb}, or ")
    trained(store, tmp_path / "other", optimizer="adam", max_steps=1)
    with pytest.raises(Refused, match=f"left by adam, .* to {lamb}"):
        trained(store, tmp_path / "other", optimizer=lamb, resume=True)


def test_a_file_never_names_an_optimiser_of_ones_own_and_run_json_says_what_it_was(store, tmp_path, capfd):
    run, name = tmp_path / "run", "examples.optimizers:Lamb"
    words = ["--store", str(store), "--hidden", "16", "--max-steps", "1", "--out", str(run)]
    assert train_command.main([*words, "--optimizer", name]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"] == "own"
    assert json.loads((run / "run.json").read_text())["optimizer_code"] == name
    assert config_of_run(run).hidden == 16
    resume = ["--out", str(run), "--resume", "--max-steps", "2"]
    assert train_command.main(resume) == 2
    said = capfd.readouterr().err
    assert "code of your own" in said
    assert "repeat --optimizer package.module:Class" in said
    assert train_command.main([*resume, "--optimizer", name]) == 0
    assert json.loads((run / "run.json").read_text())["steps"] == 2
    assert resume_command(run, TrainConfig(optimizer=name)).endswith(f"--out {run} --resume --optimizer {name}")
    assert f"/config.yaml --optimizer {name} --out" in command(read_run_files(run))
    (tmp_path / "file.yaml").write_text(f"optimizer: {name}\n")
    with pytest.raises(ConfigError, match=f"optimizer is '{name}'") as refused:
        parse(TrainConfig, "", ["--config", str(tmp_path / "file.yaml")])
    assert f"as a flag: --optimizer {name}" in refused.value.hint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"optimizer": "lars"}, "use --optimizer examples.optimizers:Lars, with examples/"),
        ({"optimizer": "lamb"}, "use --optimizer examples.optimizers:Lamb, with examples/"),
        ({"optimizer": "admw"}, "adamw, adam, sgd, or package.module:Class\nhint: .*adamw"),
    ],
)
def test_what_no_optimiser_can_use_is_refused_by_name(flags, words):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**flags)
    assert re.search(words, str(refused.value))
