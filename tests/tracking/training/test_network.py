"""The network of a run is what its flags ask for."""

from dataclasses import fields

import torch

from domainpar.nn.heads import EDGE, Head
from domainpar.nn.options import NetworkOptions
from domainpar.nn.standard import Standard
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.networks.catalogue import options_of_run

ASKED = {
    "hidden": 32, "graph_iters": 5, "shared_weights": True, "residual": False, "aggregate": "sum", "activation": "tanh",
    "norm": "none", "readouts": "all", "dropout": 0.25, "seed": 7,
}  # fmt: skip
NOT_ASKED_FOR = {"order", "layers", "recompute_every"}
"""Options that no flag of the network has: `order` goes with its name, `recompute_every` is set where it is trained."""


def test_flags_are_options_of_the_same_names_and_none_is_lost():
    standard = Standard.neutral(3, 6)
    options = options_of_run(TrainConfig(**ASKED, precision="bf16"), standard, (EDGE,))
    assert options == NetworkOptions(**ASKED, products=torch.bfloat16, standard=standard, heads=(EDGE,))
    same = {it.name for it in fields(NetworkOptions) if getattr(options, it.name) == getattr(NetworkOptions(), it.name)}
    assert same == {*NOT_ASKED_FOR, "dtype", "heads"}
    assert options_of_run(TrainConfig(dtype="float64"), None, (EDGE,)) == NetworkOptions(dtype=torch.float64)


def test_heads_are_those_of_the_tasks():
    jets = (Head("jet", "graph", 3),)
    assert options_of_run(TrainConfig(), None, jets).heads == jets
