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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import EventGraph, FloatArray, Hits, IntArray, check_graph
from domainpar.problems import Place, Problem

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
        Problem: If the directory does not exist or holds no graph, or two files have one name.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise Problem(f"{directory} is not a directory", "give the one that holds the .pt or .pyg files")
    names = sorted(_event_id(path) for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not names:
        raise Problem(f"{directory} holds no PyG graphs", "expected are files ending in .pt or .pyg")
    for name, following in itertools.pairwise(names):
        if name == following:
            raise Problem(f"{directory} holds two files of this event", "names of events are unique", event=name)
    return names


def event_path(directory: str | Path, event_id: str) -> Path:
    """The file of an event of a directory.

    Raises:
        Problem: If there is none.
    """
    for stem in (f"event{event_id}", event_id):
        for suffix in _SUFFIXES:
            path = Path(directory) / f"{stem}{suffix}"
            if path.is_file():
                return path
    raise Problem(f"no {event_id}.pt or .pyg in {directory}", event=event_id)


def read_event(path: str | Path) -> EventGraph:
    """Read one graph: a PyG `Data`, or a dict of tensors with the same names.

    Args:
        path: The file. Its name without `event` and suffix is the name of the event.

    Returns:
        The graph in the order of the file. `x` [N, F] (or [N]) gives the features, `edge_attr` [E, G] (or [E]) the edge
        features, `pos` [N, 3] the positions in mm, `y` [E] or [E, 1] of 0 and 1 the labels. Hit ids are the rows.
        Other entries are left alone.

    Raises:
        Problem: Naming event and file: if the file asks for more than tensors and `Data` (with the names of what it
            asks for), is damaged, or lacks x or edge_index; if a shape does not fit, an edge names a node that does
            not exist, a value is not finite, or y is not one 0 or 1 per edge.
    """
    path = Path(path)
    place = Place(_event_id(path), path)
    entries = read_entries(place)
    features = _features(entries, "x", "node", place)
    edge_index = _edge_index(entries, place)
    edge_attr = (
        _features(entries, "edge_attr", "edge", place)
        if entries.get("edge_attr") is not None
        else np.zeros((edge_index.shape[1], 0), np.float32)
    )
    graph = EventGraph(
        hits=_hits(_event_id(path), len(features), _position(entries, len(features), place)),
        features=features,
        feature_names=tuple(f"x{i}" for i in range(features.shape[1])),
        edge_index=edge_index,
        edge_features=edge_attr,
        edge_feature_names=tuple(f"edge_attr{i}" for i in range(edge_attr.shape[1])),
        label=_label(entries, edge_index.shape[1], len(features), place),
    )
    check_graph(graph, place)
    return graph


def _event_id(path: Path) -> str:
    return path.stem.removeprefix("event") or path.stem


def read_entries(place: Place) -> Mapping[str, Any]:
    """Names and values of a saved `Data` or dict, read by allow-list: nothing that the file brings is run.

    Args:
        place: The event and its file.

    Raises:
        Problem: If the file asks for more than tensors, numpy values and `Data` (with the names of what it asks for),
            cannot be read, holds something else, or claims more values than fit into it.
    """
    path = Path(str(place.file))
    entries = _entries(_load(path, place), place)
    for name, value in entries.items():
        _check_claim(str(name), value, path, place)
    return entries


def _check_claim(name: str, value: Any, path: Path, place: Place) -> None:
    """Refuse a value of more entries than its file has bytes: a tensor of stride 0 takes no room until it is used."""
    claimed = value.size if isinstance(value, np.ndarray) else value.numel() if hasattr(value, "numel") else 0
    if claimed > (size := path.stat().st_size):
        raise place.problem(f"{name} claims {claimed} values, more than the {size} bytes of the file can hold")


def _load(path: Path, place: Place) -> object:
    """The content of the file, read without running anything it brings."""
    import torch

    if not path.is_file():
        raise place.problem("no such file")
    with torch.serialization.safe_globals(_allowed()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols that the reader then refuses itself
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            forbidden = _forbidden(path)
            if forbidden:
                raise place.problem(
                    f"refused, nothing of it was run: it asks for {', '.join(forbidden)}",
                    "only tensors, numpy arrays and plain torch_geometric Data are read; save the graph as a dict of "
                    f"tensors{_pyg_hint()}",
                ) from error
            raise place.problem(
                f"cannot be read, {_reason(error)}", "is it truncated, or not a file of torch.save?"
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
    with contextlib.suppress(Exception), path.open("rb") as file:
        while True:  # torch's old format is several pickles in a row, then raw bytes that end the listing
            for name in _globals_of_next_pickle(file):
                asked.add(name)
    return sorted(name for name in asked if not name.startswith(_HARMLESS))


def _globals_of_next_pickle(file: IO[bytes]) -> Iterator[str]:
    strings: list[str] = []
    memo: dict[int, str | None] = {}
    last: str | None = None  # the text that was pushed last, which is what is memorised next
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if argument is None else int(str(argument))] = last
            continue
        last = argument if isinstance(argument, str) and "UNICODE" in opcode.name else None
        if opcode.name in ("BINGET", "LONG_BINGET", "GET"):
            last = memo.get(int(str(argument)))
        if last is not None:
            strings.append(last)


def _pyg_hint() -> str:
    try:
        importlib.import_module("torch_geometric")
    except ImportError:
        return "; to read Data objects, install torch-geometric"
    return ""


def _reason(error: Exception) -> str:
    # torch's own text advises to load the file unsafely; that advice is not passed on.
    if isinstance(error, pickle.UnpicklingError):
        return "not a pickle of tensors"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _entries(content: object, place: Place) -> Mapping[str, Any]:
    """Names and values of a Data or a dict."""
    if isinstance(content, Mapping):
        return content
    to_dict = getattr(content, "to_dict", None)
    if to_dict is None:
        raise place.problem(f"holds a {type(content).__name__}, expected a torch_geometric Data or a dict of tensors")
    entries: Mapping[str, Any] = to_dict()
    return entries


def _array(entries: Mapping[str, Any], name: str, place: Place) -> npt.NDArray[Any]:
    value = entries.get(name)
    if value is None:
        raise place.problem(f"no {name}; found {sorted(map(str, entries))}, expected at least x and edge_index")
    return as_array(value, name, place)


def as_array(value: Any, name: str, place: Place) -> npt.NDArray[Any]:
    """A dense real tensor or a numpy array as a numpy array; floating-point tensors become float64.

    Raises:
        Problem: If it is something else.
    """
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__ != "torch" or not hasattr(value, "detach"):
        raise place.problem(f"{name} is a {type(value).__name__}, expected a tensor")
    tensor = value.detach()
    if tensor.is_sparse or tensor.is_complex():
        raise place.problem(f"{name} is a sparse or complex tensor, expected a dense real one")
    if tensor.is_floating_point():
        tensor = tensor.double()  # numpy has no bfloat16
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _features(entries: Mapping[str, Any], name: str, of: str, place: Place) -> FloatArray:
    values = _array(entries, name, place)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or values.dtype == object:
        raise place.problem(f"{name} has shape {list(values.shape)}, expected one row of numbers per {of}")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return values.astype(np.float32)


def _edge_index(entries: Mapping[str, Any], place: Place) -> IntArray:
    edge_index = _array(entries, "edge_index", place)
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or not np.issubdtype(edge_index.dtype, np.integer):
        raise place.problem(
            f"edge_index is {edge_index.dtype} of shape {list(edge_index.shape)}, expected integers [2, E]"
        )
    return edge_index.astype(np.int64)


def _position(entries: Mapping[str, Any], num_nodes: int, place: Place) -> FloatArray | None:
    if entries.get("pos") is None:
        return None
    position = _array(entries, "pos", place)
    if position.shape != (num_nodes, 3):
        raise place.problem(
            f"pos has shape {list(position.shape)}, expected x, y, z in mm of each of {num_nodes} nodes",
            "remove it to go without a geometry",
        )
    return position.astype(np.float32)


def _label(entries: Mapping[str, Any], num_edges: int, num_nodes: int, place: Place) -> npt.NDArray[np.uint8] | None:
    if entries.get("y") is None:
        return None
    y = _array(entries, "y", place)
    if y.shape not in {(num_edges,), (num_edges, 1)}:
        per = " (one per node)" if y.shape[:1] == (num_nodes,) else ""
        raise place.problem(
            f"y has shape {list(y.shape)}{per}, expected one label per edge, [{num_edges}]",
            "remove it to go without labels",
        )
    y = y.reshape(-1)
    bad = np.flatnonzero((y != 0) & (y != 1))
    if len(bad):
        raise place.problem(f"y of edge {bad[0]} is {y[bad[0]]}, expected 0 or 1 ({len(bad)} such edges)")
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
