"""Optimisers by name: their formulas, one hash on any number of ranks, and a run that goes on where it was stopped."""

import pickle

import invariance
import numpy as np
import pytest
import torch
from marks import slow
from random_store import write_random_store
from torch import nn

from domainpar.common.agreement import Refused
from domainpar.nn.optimizers import OPTIMIZERS, make_optimizer, optimizer_name
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import ConfigError, TrainConfig
from domainpar.tracking.config.texts import Factors
from domainpar.tracking.training.run import train

STEPS = 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_can_be_copied_and_have_their_names(name):
    optimizer = make_optimizer(name, layer()[0], layer()[0], lr=0.25, weight_decay=0.5)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is OPTIMIZERS[name]
    assert copied.param_groups[0]["lr"] == 0.25
    assert optimizer_name(copied) == name


def test_optimisers_of_torch_have_the_names_of_ours():
    parameters = [nn.Parameter(torch.zeros(2))]
    made = [kind(parameters) for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RAdam)]
    assert [optimizer_name(it) for it in made] == ["adamw", "adam", "sgd", "RAdam"]


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
    "lars": (lars, {"lr": 2.0, "momentum": 0.8, "weight_decay": 0.1}),
    "lamb": (lamb, {"lr": 0.1, "betas": (0.7, 0.9), "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_layerwise_optimisers_are_their_formulas(name):
    formula, options = FORMULAS[name]
    model, gradients = layer()
    optimizer = make_optimizer(name, model, model, **options)
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
    options = {"momentum": 0.8} if name == "sgd" else {"betas": (0.7, 0.9)}
    outcomes = []
    for make in (lambda model, **all_: make_optimizer(name, model, model, **all_), None):
        model, gradients = layer()
        common = {"lr": 0.1, "weight_decay": 0.1, **options}
        optimizer = TORCHS[name](model.parameters(), **common) if make is None else make(model, **common)
        for of_step in gradients:
            for parameter, gradient in zip(model.parameters(), of_step):
                parameter.grad = gradient.clone()
            optimizer.step()
        outcomes.append(list(model.parameters()))
    assert all(map(torch.equal, *outcomes))


def test_of_several_patterns_that_fit_the_last_counts():
    model = layer()[0]
    patterns = {"r": 0.5, "^matrix": 3.0}
    optimizer = make_optimizer("sgd", model, model, lr=1.0, weight_decay=0.0, lr_factors=patterns)
    factors = {id(one): group["factor"] for group in optimizer.param_groups for one in group["params"]}
    assert {name: factors[id(one)] for name, one in model.named_parameters()} == {
        "matrix": 3.0,
        "vector": 0.5,
        "zeros": 0.5,
    }
    with pytest.raises(ValueError, match="no parameter has 'head' in its name; the names are matrix, vector, zeros"):
        make_optimizer("sgd", model, model, lr=1.0, weight_decay=0.0, lr_factors={"head": 1.0})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"))


RUNS = {
    "lars": {"optimizer": "lars", "lr": 3.0, "clip": 0.5},
    "lamb": {"optimizer": "lamb", "lr": 0.02, "lr_factors": "head: 0.1", "events_per_step": 2},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "lr_factors": "head: 0"},
}


def _results(world, store, out, flags):
    return invariance.results(world, store, out, **flags)


@pytest.mark.parametrize("name", ["lamb", slow("lars"), slow("sgd")])
def test_any_number_of_ranks_has_one_hash(store, tmp_path, name):
    found = [result for ranks in (1, 3) for result in run_ranks(_results, ranks, store, tmp_path / "run", RUNS[name])]
    for what in ("steps", "parameters", "scores"):
        assert len({result[what] for result in found}) == 1, what


def trained(store, out, **flags):
    config = TrainConfig(**{**invariance.SMALL, "overwrite": False, "store": str(store), "out": str(out), **flags})
    return train(config, store, World.alone())


def test_a_factor_of_0_leaves_a_layer_as_it_was(store, tmp_path):
    head = [
        [
            it.detach().clone()
            for it in trained(
                store, tmp_path / str(steps), **RUNS["sgd"], max_steps=steps
            ).trainer.model.head.parameters()
        ]
        for steps in (1, 3)
    ]
    assert all(map(torch.equal, *head))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(store, tmp_path, name):
    flags = RUNS[name] | {"epochs": 1}
    whole = trained(store, tmp_path / "whole", **flags)
    trained(store, tmp_path / "run", **flags, max_steps=1)
    resumed = trained(store, tmp_path / "run", **flags, resume=True)
    assert invariance.parameters_of(resumed) == invariance.parameters_of(whole)


def test_a_checkpoint_of_another_optimiser_is_refused(store, tmp_path):
    trained(store, tmp_path / "run", **RUNS["lamb"], max_steps=1)
    for name in ("adam", "sgd"):  # one keeps what has the same names
        with pytest.raises(Refused, match=f"was left by lamb, and what that keeps means nothing to {name}"):
            trained(store, tmp_path / "run", optimizer=name, resume=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"betas": "0.9"}, "--betas '0.9': not two numbers"),
        ({"betas": "0.9,1"}, "not two numbers from 0 up to, but not, 1"),
        ({"momentum": 1.0}, "--momentum is 1.0"),
        ({"momentum": 0.5}, "--momentum 0.5 means nothing with --optimizer adamw"),
        ({"optimizer": "lars", "betas": "0.5,0.9"}, "--betas 0.5,0.9 means nothing with --optimizer lars"),
        ({"lr_factors": "{}"}, "not a mapping"),
        ({"lr_factors": "head"}, "'head' has None"),
        ({"lr_factors": "head: -1"}, "'head' has -1, not a number from 0 on"),
        ({"lr_factors": "head: yes"}, "'head' has True"),
        ({"lr_factors": "head: fast"}, "'head' has 'fast'"),
        ({"lr_factors": "'(': 1"}, "no regular expression"),
    ],
)
def test_what_no_optimiser_can_use_is_refused_by_name(flags, words):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**flags)
    assert words in f"{refused.value}{refused.value.hint}"


def test_factors_may_be_written_as_numbers_are():
    assert Factors("head: 1e-3, '^node.*': 2").value == {"head": 0.001, "^node.*": 2.0}
