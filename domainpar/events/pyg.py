"""Plain PyG `Data` files (`.pt`, `.pyg`): x, edge_index, and where given edge_attr, y and pos. Anyone's graph.

Such a file is a pickle, and a pickle is a program. It is read by torch's restricted unpickler with a short list of
allowed classes; a file that asks for anything else is refused, and there is no switch to run it anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pickle
import pickletools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.events.checks import check_graph
from domainpar.events.graph import EventGraph, FloatArray, Hits, IntArray

_SUFFIXES = (".pt", ".pyg")
_ALLOWED_PYG = (
    "torch_geometric.data.data.Data",
    "torch_geometric.data.data.DataTensorAttr",
    "torch_geometric.data.data.DataEdgeAttr",
    "torch_geometric.data.graph_store.EdgeLayout",
    "torch_geometric.data.storage.BaseStorage",
    "torch_geometric.data.storage.NodeStorage",
    "torch_geometric.data.storage.EdgeStorage",
    "torch_geometric.data.storage.GlobalStorage",
)
# Of torch itself; never worth naming as the reason for a refusal.
_HARMLESS = ("torch._utils.", "torch._tensor.", "torch.storage.", "torch.Size", "torch.Float", "torch.Double",
             "torch.Long", "torch.Int", "torch.Bool", "torch.Byte", "collections.OrderedDict", *_ALLOWED_PYG,
             "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray.", "numpy._core.multiarray.")  # fmt: skip


def list_events(directory: str | Path) -> list[str]:
    """The graphs of a directory, sorted: `7` for `event7.pt`, `top` for `top.pyg`.

    Raises:
        ValueError: If the directory does not exist or holds no graph, or two files have one name.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give the one that holds the .pt or .pyg files.")
    names = sorted(_event_id(path) for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not names:
        raise ValueError(f"{directory} holds no PyG graphs; expected files ending in .pt or .pyg.")
    for name, following in itertools.pairwise(names):
        if name == following:
            raise ValueError(f"{directory} holds two files for event {name}; names of events are unique.")
    return names


def event_path(directory: str | Path, event_id: str) -> Path:
    """The file of an event of a directory.

    Raises:
        ValueError: If there is none.
    """
    for stem in (f"event{event_id}", event_id):
        for suffix in _SUFFIXES:
            path = Path(directory) / f"{stem}{suffix}"
            if path.is_file():
                return path
    raise ValueError(f"event {event_id}: no {event_id}.pt or .pyg in {directory}.")


def read_event(path: str | Path) -> EventGraph:
    """Read one graph: a PyG `Data`, or a dict of tensors with the same names.

    Args:
        path: The file. Its name without `event` and suffix is the name of the event.

    Returns:
        The graph in the order of the file. `x` [N, F] (or [N]) gives the features, `edge_attr` [E, G] (or [E]) the edge
        features, `pos` [N, 3] the positions in mm, `y` [E] or [E, 1] of 0 and 1 the labels. Hit ids are the rows.
        Other entries are left alone.

    Raises:
        ValueError: Naming event and file: if the file asks for more than tensors and `Data` (with the names of what it
            asks for), is damaged, or lacks x or edge_index; if a shape does not fit, an edge names a node that does
            not exist, a value is not finite, or y is not one 0 or 1 per edge.
    """
    path = Path(path)
    where = f"event {_event_id(path)}, file {path}"
    entries = read_entries(path, where)
    features = _features(entries, "x", "node", where)
    edge_index = _edge_index(entries, where)
    edge_attr = (
        _features(entries, "edge_attr", "edge", where)
        if entries.get("edge_attr") is not None
        else np.zeros((edge_index.shape[1], 0), np.float32)
    )
    graph = EventGraph(
        hits=_hits(_event_id(path), len(features), _position(entries, len(features), where)),
        features=features,
        feature_names=tuple(f"x{i}" for i in range(features.shape[1])),
        edge_index=edge_index,
        edge_features=edge_attr,
        edge_feature_names=tuple(f"edge_attr{i}" for i in range(edge_attr.shape[1])),
        label=_label(entries, edge_index.shape[1], len(features), where),
    )
    check_graph(graph, where)
    return graph


def _event_id(path: Path) -> str:
    return path.stem.removeprefix("event") or path.stem


def read_entries(path: Path, where: str) -> Mapping[str, Any]:
    """Names and values of a saved `Data` or dict, read by allow-list: nothing that the file brings is run.

    Args:
        path: The file.
        where: What the messages begin with: the event and its file.

    Raises:
        ValueError: If the file asks for more than tensors, numpy values and `Data` (with the names of what it asks
            for), cannot be read, or holds something else.
    """
    return _entries(_load(path, where), where)


def _load(path: Path, where: str) -> object:
    """What the file holds, read without running anything it brings."""
    import torch

    if not path.is_file():
        raise ValueError(f"{where}: no such file.")
    with torch.serialization.safe_globals(_allowed()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols that the reader then refuses itself
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            forbidden = _forbidden(path)
            if forbidden:
                raise ValueError(
                    f"{where}: refused, nothing of it was run: it asks for {', '.join(forbidden)}. Only tensors, numpy "
                    f"arrays and plain torch_geometric Data are read; save the graph as a dict of tensors.{_pyg_hint()}"
                ) from error
            raise ValueError(
                f"{where}: cannot be read, {_reason(error)}; truncated, or not a file of torch.save?"
            ) from error


def _allowed() -> list[Any]:
    """Classes that a file may name: plain PyG containers and numpy's arrays, scalars and types."""
    multiarray = importlib.import_module("numpy._core.multiarray")
    scalars = [np.dtype(kind) for kind in "?bBhHiIlLqQefdUS"]
    allowed: list[Any] = [np.ndarray, np.dtype, multiarray.scalar, multiarray._reconstruct]
    # Files of numpy 1 name the same functions by their old module.
    allowed += [(multiarray.scalar, "numpy.core.multiarray.scalar")]
    allowed += [(multiarray._reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [type(kind) for kind in scalars]
    # Dicts of tensors can be read without torch_geometric; a Data is then refused by name.
    with contextlib.suppress(ImportError):
        allowed += [_named(name) for name in _ALLOWED_PYG]
    return allowed


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _forbidden(path: Path) -> list[str]:
    """The names that a file asks for and that are not allowed; empty where the file cannot even be listed."""
    import torch

    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return _globals_of_bare_pickle(path)


def _globals_of_bare_pickle(path: Path) -> list[str]:
    """The same for files older than torch's zip format: they are listed opcode by opcode, without running any."""
    asked: set[str] = set()
    strings: list[str] = []
    with contextlib.suppress(Exception), path.open("rb") as file:
        while True:  # torch's old format is several pickles in a row, then raw bytes that end the listing
            for opcode, argument, _ in pickletools.genops(file):
                if isinstance(argument, str):
                    strings.append(argument)
                if opcode.name == "GLOBAL":
                    asked.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    asked.add(".".join(strings[-2:]))
    return sorted(name for name in asked if not name.startswith(_HARMLESS))


def _pyg_hint() -> str:
    try:
        importlib.import_module("torch_geometric")
    except ImportError:
        return " To read Data objects, install torch-geometric."
    return ""


def _reason(error: Exception) -> str:
    # torch's own text advises to load the file unsafely; that advice is not passed on.
    if isinstance(error, pickle.UnpicklingError):
        return "not a pickle of tensors"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _entries(content: object, where: str) -> Mapping[str, Any]:
    """Names and values of a Data or a dict."""
    if isinstance(content, Mapping):
        return content
    to_dict = getattr(content, "to_dict", None)
    if to_dict is None:
        raise ValueError(
            f"{where}: holds a {type(content).__name__}, expected a torch_geometric Data or a dict of tensors."
        )
    entries: Mapping[str, Any] = to_dict()
    return entries


def _array(entries: Mapping[str, Any], name: str, where: str) -> npt.NDArray[Any]:
    value = entries.get(name)
    if value is None:
        raise ValueError(f"{where}: no {name}; found {sorted(map(str, entries))}, expected at least x and edge_index.")
    return as_array(value, name, where)


def as_array(value: Any, name: str, where: str) -> npt.NDArray[Any]:
    """A dense real tensor or a numpy array as a numpy array; floating-point tensors become float64.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__ != "torch" or not hasattr(value, "detach"):
        raise ValueError(f"{where}: {name} is a {type(value).__name__}, expected a tensor.")
    tensor = value.detach()
    if tensor.is_sparse or tensor.is_complex():
        raise ValueError(f"{where}: {name} is a sparse or complex tensor, expected a dense real one.")
    if tensor.is_floating_point():
        tensor = tensor.double()  # numpy has no bfloat16
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _features(entries: Mapping[str, Any], name: str, of: str, where: str) -> FloatArray:
    values = _array(entries, name, where)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or values.dtype == object:
        raise ValueError(f"{where}: {name} has shape {list(values.shape)}, expected one row of numbers per {of}.")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return values.astype(np.float32)


def _edge_index(entries: Mapping[str, Any], where: str) -> IntArray:
    edge_index = _array(entries, "edge_index", where)
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or not np.issubdtype(edge_index.dtype, np.integer):
        raise ValueError(
            f"{where}: edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}, expected integers [2, E]."
        )
    return edge_index.astype(np.int64)


def _position(entries: Mapping[str, Any], num_nodes: int, where: str) -> FloatArray | None:
    if entries.get("pos") is None:
        return None
    position = _array(entries, "pos", where)
    if position.shape != (num_nodes, 3):
        raise ValueError(
            f"{where}: pos has shape {list(position.shape)}, expected x, y, z in mm of each of {num_nodes} nodes; "
            "remove it to go without a geometry."
        )
    return position.astype(np.float32)


def _label(entries: Mapping[str, Any], num_edges: int, num_nodes: int, where: str) -> npt.NDArray[np.uint8] | None:
    if entries.get("y") is None:
        return None
    y = _array(entries, "y", where)
    if y.shape not in {(num_edges,), (num_edges, 1)}:
        per = " (one per node)" if y.shape[:1] == (num_nodes,) else ""
        raise ValueError(
            f"{where}: y has shape {list(y.shape)}{per}, expected one label per edge, [{num_edges}]; "
            "remove it to go without labels."
        )
    y = y.reshape(-1)
    bad = np.flatnonzero((y != 0) & (y != 1))
    if len(bad):
        raise ValueError(f"{where}: y of edge {bad[0]} is {y[bad[0]]}, expected 0 or 1 ({len(bad)} such edges).")
    return y.astype(np.uint8)


def _hits(event_id: str, num_nodes: int, position: FloatArray | None) -> Hits:
    unknown = np.zeros(num_nodes, np.int32)
    return Hits(
        event_id=event_id,
        hit_id=np.arange(num_nodes),
        position=position,
        volume=unknown,
        layer=unknown,
        module=unknown,
    )
