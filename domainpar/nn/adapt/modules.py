"""Checks of a module before it runs, the tensors that it holds, and its parameters with a row for each node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.part import GraphPart, holds_rows
from domainpar.nn.adapt.rows import NotExact, version_of

_ONE_LIST = (
    "reads its rows as one list, in order and padded, which no rank has; use sum, mean, max, std, softmax or attention "
    "aggregations"
)
_BY_TYPE = "sorts nodes by their type; use RGCNConv, RGATConv or HeteroConv"
REASONS = {
    "ClusterGCNConv": "takes the place of a self-loop in the list of edges for the number of its node; use GCNConv",
    "GRUAggregation": _ONE_LIST,
    "GraphMultisetTransformer": _ONE_LIST,
    "GraphUNet": "keeps the best nodes of each graph and joins edges to longer ones, both of the whole graph",
    "HEATConv": _BY_TYPE,
    "HGTConv": _BY_TYPE,
    "LCMAggregation": _ONE_LIST,
    "LSTMAggregation": _ONE_LIST,
    "MLPAggregation": _ONE_LIST,
    "MedianAggregation": "sorts the rows of each node, also those of other ranks; use mean, or softmax aggregation",
    "MeshCNNConv": "takes every fourth edge for one of a kind, by its place in the list",
    "PatchTransformerAggregation": _ONE_LIST,
    "QuantileAggregation": "sorts the rows of each node, also those of other ranks; use mean, max or std",
    "SetTransformerAggregation": _ONE_LIST,
    "SortAggregation": _ONE_LIST,
    "WLConv": "names colours in the order in which it meets them; use WLConvContinuous",
}
"""Why modules of torch_geometric have no exact form, and what to use; by class. The watch decides, not this table."""


def reason_of(modules: list[nn.Module]) -> str:
    """The known reason of the innermost module that has one; empty without any."""
    kind = next((kind for module in reversed(modules) if (kind := type(module).__name__) in REASONS), None)
    return f"{kind} {REASONS[kind]}; " if kind else ""


def check_module(module: nn.Module) -> None:
    """Refuse at once what would be wrong on a split graph, or cannot begin alike on every rank.

    Raises:
        ValueError: With what it is and what to do.
        NotExact: If torch would not tell what happens inside it.
    """
    modules = [(name or "the model", child) for name, child in module.named_modules()]
    if scripted := [name for name, child in modules if isinstance(child, torch.jit.ScriptModule)]:
        raise NotExact(
            f"{', '.join(scripted)}: a module of torch.jit.script, and calls inside of it cannot be watched. Set "
            "the environment variable PYTORCH_JIT=0 before torch is imported, or give the module as it was before."
        )
    check_whole(module)
    check_sizes(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_complex():
            raise ValueError(f"{name} is complex; keep real and imaginary part apart.")
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_backward_pre_hooks")  # of parameters and modules
    holders = [*module.named_parameters(), *modules]
    if hooked := [name for name, holder in holders if any(getattr(holder, kind, None) for kind in hooks)]:
        raise ValueError(
            f"there are hooks on the gradients of {', '.join(hooked)}: they would see one rank's share of them; change "
            "gradients after reduce_gradients, or clip with --clip."
        )


def check_whole(module: nn.Module) -> None:
    """Refuse parameters of which each rank holds a shard, sharded inside of the module or around it.

    Raises:
        ValueError: With the first of them, and what to do.
    """
    # Torch leaves no other trace in what FullyShardedDataParallel wraps. Kinds of tensors are known by name, for
    # importing them takes a second.
    sharded = [(name, "FSDP") for name, it in module.named_modules() if vars(it).get("_is_fsdp_managed_module")]
    sharded += [(name, "DTensor") for name, it in module.named_parameters() if type(it).__name__ == "DTensor"]
    for name, kind in sharded:
        raise ValueError(
            f"{name or 'the model'} is sharded over ranks ({kind} of torch.distributed), where every rank has to hold "
            "its parameters whole; leave fully_shard and FullyShardedDataParallel away: reduce_gradients sums."
        )


def check_sizes(module: nn.Module) -> None:
    """Refuse parameters and buffers that have no size yet.

    Raises:
        ValueError: If there are any.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(
                f"the size of {name} is not known yet (-1 channels, a lazy layer); run the module once on a small "
                "graph or give the sizes, so that every rank begins with the same weights."
            )


def common_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a module holds, by name, also outside its parameters and buffers, but for rows of parts."""
    tensors: dict[str, Tensor] = {}
    kept_apart = ("_parameters", "_buffers", "_modules")
    for path, child in module.named_modules():
        for name, value in {**vars(child), **child._parameters, **child._buffers}.items():
            if name not in kept_apart and isinstance(value, (Tensor, list, tuple, dict)):
                for number, tensor in enumerate(tensors_in(value)):
                    place = name if tensor is value else f"{name}[{number}]"
                    tensors[f"{path}.{place}" if path else place] = tensor
    return {name: tensor for name, tensor in tensors.items() if not holds_rows(tensor)}


_ROWS = "_domainpar_rows_in"  # of a module: its buffers that held rows at the end of a pass
_KEEPS_OUT = "_domainpar_keeps_rows_out"


def note_rows(module: nn.Module) -> None:
    """Note which buffers hold rows of a part: on another device or of another type they no longer say so themselves."""
    for child in module.modules():
        if child._buffers:
            vars(child).setdefault(_ROWS, set()).update(
                name for name, buffer in child._buffers.items() if buffer is not None and holds_rows(buffer)
            )


def keep_rows_out_of_state(module: nn.Module) -> None:
    """Refuse from now on to take a state with rows of a part in it, or to load one into them. A second call is one."""
    for child in module.modules():
        if not vars(child).setdefault(_KEEPS_OUT, False):
            vars(child)[_KEEPS_OUT] = True
            child.register_state_dict_pre_hook(_refuse_to_take)
            child.register_load_state_dict_pre_hook(_refuse_to_load)


def check_state(module: nn.Module) -> None:
    """Refuse a module whose state holds rows of a part.

    Raises:
        NotExact: Naming the buffer.
    """
    for path, child in module.named_modules():
        _refuse_to_take(child, f"{path}." if path else "", False)


def _refuse_to_take(child: nn.Module, prefix: str, keep_vars: bool) -> None:
    _refuse(child, prefix, child._buffers.keys() - child._non_persistent_buffers_set)


def _refuse_to_load(child: nn.Module, state: Mapping[str, Tensor], prefix: str, *others: object) -> None:
    _refuse(child, prefix, [name for name in child._buffers if f"{prefix}{name}" in state])


def _refuse(child: nn.Module, prefix: str, names: Iterable[str]) -> None:
    """Refuse the buffers of these names that hold rows, the first by name."""
    for name in sorted(names):
        buffer = child._buffers[name]
        if buffer is not None and (holds_rows(buffer) or name in vars(child).get(_ROWS, ())):
            raise NotExact(
                f"the buffer {prefix}{name} holds rows of this rank's part of a graph, which mean nothing in a state: "
                "keep them as a plain attribute, or register the buffer with persistent=False."
            )


def owner_of(module: nn.Module, name: str) -> nn.Module:
    """The module inside a module that holds a parameter or a buffer itself.

    Raises:
        ValueError: If none has this name.
    """
    path, _, attribute = name.rpartition(".")
    owner: nn.Module | None = dict(module.named_modules(remove_duplicate=False)).get(path)
    if owner is None or {**owner._parameters, **owner._buffers}.get(attribute) is None:
        names = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.dim()]
        raise ValueError(f"the module has no parameter or buffer {name!r}; it has {', '.join(names) or 'none'}.")
    return owner


@contextmanager
def read_as_nodes(name: str, owner: nn.Module, part: GraphPart) -> Iterator[None]:
    """While it lasts, a module reads this part's rows, marked, where it holds a row for each node of the graph.

    Args:
        name: Of the parameter or buffer that is meant.
        owner: The module that holds it.
        part: The part.

    Raises:
        ValueError: If it has not as many rows as the graph has nodes.
        NotExact: If the module has changed it.
    """
    attribute = name.rpartition(".")[2]
    whole = getattr(owner, attribute)
    try:
        rows = part.read_nodes(whole)
    except ValueError as problem:
        raise ValueError(f"{name} is to have a row for each node: {problem}") from None
    version = version_of(rows)
    # Python looks here first; optimisers and state_dict find the whole one where it was.
    vars(owner)[attribute] = rows
    try:
        yield
        same = vars(owner).get(attribute) is rows and {**owner._parameters, **owner._buffers}.get(attribute) is whole
    finally:
        vars(owner).pop(attribute, None)
    if not same or not (rows.is_inference() or version_of(rows) == version):
        raise NotExact(f"{name} is changed in the forward pass; of what has a row for each node only reading is known.")
