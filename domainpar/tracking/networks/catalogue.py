"""Networks by the name they have on the command line: built in on stages, of the field, or a user's own."""

from __future__ import annotations

import importlib
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.calls import Aggregate
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.heads import EDGE, Head
from domainpar.nn.interaction import InteractionNetwork, Readouts
from domainpar.nn.normed import InteractionOfRows
from domainpar.nn.on_stages import PUBLISHED_ON_STAGES
from domainpar.nn.published import OF_THE_FIELD
from domainpar.nn.standard import Standard
from domainpar.tracking.networks.on_events import OnEvents

ON_STAGES: dict[str, Callable[..., InteractionNetwork]] = {
    "interaction": partial(InteractionNetwork, order="edge-first"),
    "interaction-node-first": partial(InteractionNetwork, order="node-first"),
}
"""The same bits on any number of ranks, as those of `PUBLISHED_ON_STAGES`."""

OVER_ROWS = ("batch", "graph")
"""Norms over all rows of an event, which stages cannot have."""

OPTIONS = ("node_features", "edge_features", "hidden", "graph_iters", "dropout", "seed")
"""Arguments of networks."""

OF_FACTORIES = (*OPTIONS, "outputs")
"""A user's factory is called with those of these that it takes; `outputs`: numbers of each head by its name."""

_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads, and torch has one generator a process


def build_model(
    name: str,
    node_features: int,
    edge_features: int,
    *,
    hidden: int,
    graph_iters: int,
    shared_weights: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    products: torch.dtype | None = None,
    recompute_every: int | None = None,
    dropout: float = 0.0,
    residual: bool = True,
    aggregate: Aggregate = "root",
    activation: str = "relu",
    norm: str = "layer",
    readouts: Readouts = "last",
    heads: Sequence[Head] = (EDGE,),
    standard: Standard | None = None,
) -> EdgeClassifier:
    """Build a network; the same weights on every rank.

    Args:
        name: A name, or `package.module:factory`. A factory is called with those of `OF_FACTORIES` that it takes, and
            returns a module for `OnEvents`.
        node_features: Columns of node features.
        edge_features: Columns of edge features.
        hidden: Width of states.
        graph_iters: Iterations or layers.
        seed: Of the first weights.
        dtype: Of the parameters.
        dropout: Of `ON_STAGES` and of users' own.
        recompute_every: Keep what every K-th iteration begins with, and compute all between again in backward; None:
            keep all.
        heads: What it is read for; of `ON_STAGES` and of users' own.
        shared_weights, products, residual, aggregate, activation, norm, readouts, standard: See `InteractionNetwork`;
            of `ON_STAGES`. Others are refused any but these defaults.

    Raises:
        ValueError: If there is no network of this name, or it cannot have these sizes or options.
    """
    options: dict[str, Any] = {"hidden": hidden, "graph_iters": graph_iters, "seed": seed}
    of_stages: dict[str, Any] = {"shared_weights": shared_weights, "products": products}
    of_stages |= {"readouts": readouts, "standard": standard}
    of_stages |= {"residual": residual, "aggregate": aggregate, "activation": activation, "norm": norm}
    if name in ON_STAGES and norm in OVER_ROWS:
        if products is not None:
            raise ValueError(f"--norm {norm} has no --precision bf16: it runs in plain torch.")
        order = ON_STAGES[name].keywords["order"]  # type: ignore[attr-defined]
        options |= {name: value for name, value in of_stages.items() if name not in ("products", "norm")}
        module = InteractionOfRows(
            node_features, edge_features, norm, order=order, dropout=dropout, heads=heads, **options
        )
        return OnEvents(module.to(dtype), recompute_every, heads)
    if name in ON_STAGES:
        options |= of_stages | {"recompute_every": recompute_every, "heads": heads}
        return ON_STAGES[name](node_features, edge_features, **options, dtype=dtype, dropout=dropout)
    refused = [_FLAGS[option] for option, value in of_stages.items() if value != _DEFAULTS[option].default]
    if dropout and name in OF_THE_FIELD:
        refused.append("--dropout")
    if tuple(heads) != (EDGE,) and name in OF_THE_FIELD:
        refused.append(f"head of {', '.join(head.name for head in heads if head != EDGE)}")
    if refused:
        raise ValueError(f"--model {name} has no {', '.join(refused)}; {' and '.join(ON_STAGES)} have.")
    if name in OF_THE_FIELD:
        published = OF_THE_FIELD[name](node_features, edge_features, **options).to(dtype)
        return PUBLISHED_ON_STAGES.get(name, OnEvents)(published, recompute_every)
    sizes = {"node_features": node_features, "edge_features": edge_features, "dropout": dropout}
    outputs = {"outputs": {head.name: head.columns for head in heads}}
    if tuple(heads) == (EDGE,) and not _names_outputs(name):  # a factory that takes anything may not know of them
        outputs = {}
    return OnEvents(_own(name, sizes | options | outputs).to(dtype), recompute_every, heads)


_DEFAULTS = inspect.signature(build_model).parameters
_FLAGS = {
    "shared_weights": "--shared-weights",
    "products": "--precision bf16",
    "readouts": "--readouts all",
    "standard": "--standardise",
    "residual": "--no-residual",
    "aggregate": "--aggregate",
    "activation": "--activation",
    "norm": "--norm",
}


def _own(name: str, options: dict[str, Any]) -> nn.Module:
    """The module that a user's factory makes.

    Raises:
        ValueError: If it cannot be found or called, or makes something else.
    """
    try:
        factory = _factory(name)
        taken = [option for option in _taken(factory) if option in options]
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(options["seed"])
            module = factory(**{option: value for option, value in options.items() if option in taken})
    except (Exception, SystemExit) as error:  # whatever a user's code may raise is the user's to see, in one line
        advice = f"; a factory may take {', '.join(OF_FACTORIES)}" if isinstance(error, TypeError) else ""
        if isinstance(error, (ImportError, AttributeError)):
            advice = "; write package.module:factory, with the package on the Python path (the current directory is)"
        if (getattr(error, "name", None) or "").split(".")[0] == "torch_geometric":
            advice = "; pip install 'domainpar[pyg]' brings it"
        raise ValueError(f"model {name!r} cannot be made: {said_by(error)}{advice}.") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"model {name!r} made a {type(module).__name__}; a factory returns a torch.nn.Module.")
    return module


def _factory(name: str) -> Any:
    module_name, _, factory_name = name.partition(":")
    return getattr(import_module(module_name), factory_name)


def _taken(factory: Callable[..., Any]) -> tuple[str, ...]:
    """Those of `OF_FACTORIES` that a factory takes."""
    if getattr(factory, "__init__", None) is nn.Module.__init__:  # a class without one of its own
        return ()
    parameters = inspect.signature(factory).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(option for option in OF_FACTORIES if takes_all or option in parameters)


def _names_outputs(name: str) -> bool:
    """Whether a user's factory names the argument `outputs`."""
    try:
        return "outputs" in inspect.signature(_factory(name)).parameters
    except (Exception, SystemExit):  # `build_model` says what is wrong with it
        return False


def options_of(name: str) -> tuple[str, ...]:
    """Those of `OPTIONS` that a network makes use of; of a user's own that cannot be found, all of them."""
    if name in ON_STAGES:
        return OPTIONS
    if name in OF_THE_FIELD:
        return tuple(option for option in OPTIONS if option != "dropout")
    try:
        return tuple(option for option in _taken(_factory(name)) if option in OPTIONS)
    except (Exception, SystemExit):  # `build_model` says what is wrong with it
        return OPTIONS


def said_by(error: BaseException) -> str:
    """An error of a user's code: its kind, its text, and the last line of that code; ours names the module itself."""
    if isinstance(error, NotExact):
        return str(error)
    own = str(Path(__file__).parents[2])
    of_user = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((own, "<")) and "site-packages" not in frame.filename
        if frame.filename != importlib.__file__
    ]
    where = f" ({of_user[-1].filename}, line {of_user[-1].lineno})" if of_user else ""
    return f"{type(error).__name__}: {error}{where}"
