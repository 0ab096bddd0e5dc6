"""Networks by the name they have on the command line: built in on stages, of the field, or a user's own."""

from __future__ import annotations

import importlib
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.heads import EDGE, Head
from domainpar.nn.interaction import InteractionNetwork, InteractionsOnStages
from domainpar.nn.interaction_module import InteractionModule
from domainpar.nn.options import DEFAULTS, NetworkOptions, Order
from domainpar.nn.published import OF_THE_FIELD, InteractionGNN
from domainpar.nn.standard import Standard
from domainpar.placed.ranks import NotExact
from domainpar.tracking.config.train import TrainedFlags
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.on_events import OnEvents

ORDERS: dict[str, Order] = {"interaction": "edge-first", "interaction-node-first": "node-first"}
"""What each interaction network updates first. On stages, as `acorn`: the same bits on any number of ranks; but for
norms `OVER_ROWS`."""

OVER_ROWS = ("batch", "graph")
"""Norms over all rows of an event, which stages cannot have."""

OPTIONS = ("node_features", "edge_features", "hidden", "graph_iters", "dropout", "seed")
"""Arguments of networks."""

OF_FACTORIES = (*OPTIONS, "outputs")
"""A user's factory is called with those of these that it takes; `outputs`: numbers of each head by its name."""

_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads, and torch has one generator a process


DTYPES = {"float32": torch.float32, "float64": torch.float64}


def make_network(
    config: TrainedFlags, store: EventStore, standard: Standard | None = None, heads: tuple[Head, ...] = (EDGE,)
) -> EdgeClassifier:
    """The network of a configuration with its first weights, for the features of a store.

    `standard`: constants that standardise features; None: they are taken as they are. `heads`: what it is read for.

    Raises:
        ValueError: If it cannot be loaded, or cannot have these sizes or options.
    """
    sizes = len(store.feature_names), len(store.edge_feature_names)
    return build_model(config.model, *sizes, options_of_run(config, standard, heads))


def options_of_run(config: TrainedFlags, standard: Standard | None, heads: tuple[Head, ...]) -> NetworkOptions:
    """The options of a run's network: its flags of the same names, and what others of its flags mean."""
    same = {field.name for field in fields(NetworkOptions)} & {field.name for field in fields(config)}
    return NetworkOptions(
        **{name: getattr(config, name) for name in same - {"dtype", "recompute_every"}},
        dtype=DTYPES[config.dtype],
        products=torch.bfloat16 if config.precision == "bf16" else None,
        heads=heads,
        standard=standard,
    )


def build_model(name: str, node_features: int, edge_features: int, options: NetworkOptions) -> EdgeClassifier:
    """Build a network; the same weights on every rank.

    Args:
        name: A name, or `package.module:factory`. A factory is called with those of `OF_FACTORIES` that it takes, and
            returns a module for `OnEvents`.
        node_features: Columns of node features.
        edge_features: Columns of edge features.
        options: Its options; the name says their `order`. What a network cannot have is to be as by default:
            only those of `ORDERS` have what is in `_FLAGS`, and those of the field have no dropout and other heads.

    Raises:
        ValueError: If there is no network of this name, or it cannot have these sizes or options.
    """
    sizes = node_features, edge_features
    if name in ORDERS:
        options = replace(options, order=ORDERS[name])
        if options.norm not in OVER_ROWS:
            return InteractionNetwork(*sizes, options)
        return _on_events(InteractionModule(*sizes, options), options)
    refused = [flag for option, flag in _FLAGS.items() if getattr(options, option) != getattr(DEFAULTS, option)]
    if options.dropout and name in OF_THE_FIELD:
        refused.append("--dropout")
    if options.heads != (EDGE,) and name in OF_THE_FIELD:
        refused.append(f"head of {', '.join(head.name for head in options.heads if head != EDGE)}")
    if refused:
        raise ValueError(f"--model {name} has no {', '.join(refused)}; {' and '.join(ORDERS)} have.")
    if name in OF_THE_FIELD:
        network = OF_THE_FIELD[name]
        published = network(*sizes, hidden=options.hidden, graph_iters=options.graph_iters, seed=options.seed)
        if isinstance(published, InteractionGNN):
            return InteractionsOnStages(published.to(options.dtype), options.recompute_every, options.products)
        return _on_events(published, options)
    arguments: dict[str, Any] = {
        **vars(options),
        "node_features": node_features,
        "edge_features": edge_features,
        "outputs": {head.name: head.columns for head in options.heads},
    }
    return _on_events(_own(name, arguments), options)


def _on_events(module: nn.Module, options: NetworkOptions) -> OnEvents:
    network = OnEvents(module.to(options.dtype), options.heads, options.products)
    network.recompute(options.recompute_every)
    return network


_FLAGS = {
    "shared_weights": "--shared-weights",
    "readouts": "--readouts all",
    "standard": "--standardise",
    "residual": "--no-residual",
    "aggregate": "--aggregate",
    "activation": "--activation",
    "norm": "--norm",
}


def _own(name: str, arguments: dict[str, Any]) -> nn.Module:
    """The module that a user's factory makes, called with those of some arguments that it takes.

    Raises:
        ValueError: If it cannot be found or called, or makes something else.
    """

    def build(factory: Callable[..., Any]) -> Any:
        options = taken(factory)
        if arguments["outputs"] == {EDGE.name: EDGE.columns} and "outputs" not in inspect.signature(factory).parameters:
            options = tuple(option for option in options if option != "outputs")  # one that takes anything may not know
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(arguments["seed"])
            return factory(**{option: arguments[option] for option in options})

    module = use_own_code("model", name, OF_FACTORIES, build)
    if not isinstance(module, nn.Module):
        raise ValueError(f"model {name!r} made a {type(module).__name__}; a factory returns a torch.nn.Module.")
    return module


def use_own_code(what: str, name: str, options: Sequence[str], use: Callable[[Callable[..., Any]], Any]) -> Any:
    """What comes of the use of a user's own code.

    Args:
        what: What the code makes, for errors.
        name: Its name, `package.module:factory`; a class is a factory.
        options: Arguments that it may take, for errors.
        use: Calls it, or looks at it.

    Raises:
        ValueError: If it cannot be found or used.
    """
    try:
        return use(_factory(name))
    except (Exception, SystemExit) as error:  # whatever a user's code may raise is the user's to see, in one line
        advice = f"; a factory may take {', '.join(options)}" if isinstance(error, TypeError) else ""
        if isinstance(error, (ImportError, AttributeError)):
            advice = "; write package.module:factory, with the package on the Python path (the current directory is)"
        if (getattr(error, "name", None) or "").split(".")[0] == "torch_geometric":
            advice = "; pip install 'domainpar[pyg]' brings it"
        raise ValueError(f"{what} {name!r} cannot be made: {message_of(error)}{advice}.") from error


def _factory(name: str) -> Any:
    module_name, _, factory_name = name.partition(":")
    return getattr(import_module(module_name), factory_name)


def taken(factory: Callable[..., Any], options: Sequence[str] = OF_FACTORIES) -> tuple[str, ...]:
    """Those of some options that a factory takes."""
    if getattr(factory, "__init__", None) is nn.Module.__init__:  # a class without one of its own
        return ()
    parameters = inspect.signature(factory).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(option for option in options if takes_all or option in parameters)


def options_of(name: str) -> tuple[str, ...]:
    """Those of `OPTIONS` that a network makes use of; of a user's own that cannot be found, all of them."""
    if name in ORDERS:
        return OPTIONS
    if name in OF_THE_FIELD:
        return tuple(option for option in OPTIONS if option != "dropout")
    try:
        return tuple(option for option in taken(_factory(name)) if option in OPTIONS)
    except (Exception, SystemExit):  # `build_model` says what is wrong with it
        return OPTIONS


def message_of(error: BaseException) -> str:
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
