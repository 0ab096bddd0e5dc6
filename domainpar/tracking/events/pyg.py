"""Plain PyG `Data` files (`.pt`, `.pyg`): x, edge_index, and where given edge_attr, y and pos. Anyone's graph.

Such a file is a pickle, and a pickle is a program. It is read by torch's restricted unpickler with a short list of
allowed classes; a file that asks for anything else is refused, and there is no switch to run it anyway.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import pickletools
import pkgutil
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.graph import (
    Array,
    EventGraph,
    Hits,
    IntArray,
    Particles,
    check_array,
    check_ends,
    checked,
)
from domainpar.tracking.events.labels import MOST_CLASSES, check_labels
from domainpar.tracking.events.sources import InputFiles, Source
from domainpar.tracking.events.tables import InputTable
from partitioners.topology import FloatArray

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
_LABEL = re.compile(r"(?:(?P<of>edge|node|graph)_)?y(?:_(?P<name>\w+))?")
# Of torch itself; never named as the reason for a refusal.
_HARMLESS = ("torch._utils.", "torch._tensor.", "torch.storage.", "torch.Size", "torch.Float", "torch.Double",
             "torch.Long", "torch.Int", "torch.Bool", "torch.Byte", "collections.OrderedDict", *_ALLOWED_PYG,
             "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray.", "numpy._core.multiarray.")  # fmt: skip


def _read(files: InputFiles) -> EventGraph:
    """The graph of a PyG `Data`, or of a dict of tensors with the same names, in the order of the file.

    `x` [N, F] (or [N]) gives the features, `edge_attr` [E, G] (or [E]) the edge features, `pos` [N, 3] the positions in
    mm. `y` are labels: of edges where there is one for each, 0, 1 or -1 for not known; else of nodes or, a single one,
    of the whole graph, as their number decides. So are entries of names like `y_energy`, of nodes or the graph; with
    `edge_y`, `node_y`, `graph_y_energy` the name decides. Integers are classes, -1 not known; floats are numbers, NaN
    not known. `particle_id`, whole numbers [N], 0 for noise, are the particles of the nodes; `pt` in GeV and `eta`,
    [N], are theirs where all nodes of a particle agree. `x_names` and `edge_attr_names` name the columns, else they are
    x0, x1, ... Hit ids are the rows. Other entries are left alone.
    """
    place = files.place
    entries = read_entries(place)
    features = _features(entries, "x", "nodes", place)
    num_nodes = len(features)
    edge_index = _array(entries, "edge_index", place)
    check_ends(place, "edge_index", edge_index, num_nodes)
    edge_attr = np.zeros((edge_index.shape[1], 0), np.float32)
    if entries.get("edge_attr") is not None:
        edge_attr = _features(entries, "edge_attr", "edges", place)
    label, node_labels, graph_labels = _labels(entries, edge_index.shape[1], num_nodes, place)
    position: FloatArray | None = None
    if entries.get("pos") is not None:
        position = _array(entries, "pos", place)
        check_array(place, "pos", position, (num_nodes, 3), "x, y, z in mm,", "remove it to go without a geometry")
        position = position.astype(np.float32)
    hits = Hits.bare(place.event, np.arange(num_nodes), position)
    particle_id, particles = _truth(entries, num_nodes, place)
    graph = EventGraph(
        hits=replace(hits, particle_id=particle_id, particles=particles),
        features=features,
        feature_names=_names(entries, "x", features.shape[1], place),
        edge_index=edge_index.astype(np.int64),
        edge_features=edge_attr,
        edge_feature_names=_names(entries, "edge_attr", edge_attr.shape[1], place),
        label=label,
        node_labels=node_labels,
        graph_labels=graph_labels,
    )
    check_labels(node_labels, graph_labels, num_nodes, place)
    return checked(graph, place)


SOURCE = Source(
    _read,
    (
        InputTable(
            ("event{}.pt", "event{}.pyg", "{}.pt", "{}.pyg"), "x: f4; edge_index: i8", "edge_attr: f4; pos: f4 mm"
        ),
    ),
    "PyG graphs",
    settings=lambda options: {"labels": "y, y_NAME"},
    learns_surfaces=False,
)


_AS_A_DICT = "save the graph as a dict of tensors: torch.save({'x': x, 'edge_index': edge_index}, 'event7.pt')"
_NO_GRAPH = "this is a checkpoint, not a graph: python -m domainpar.import_acorn reads those of acorn's networks"
_LIGHTNING = ("pytorch_lightning.", "lightning.", "lightning_fabric.")


def read_entries(
    place: EventPlace, further: Sequence[tuple[Any, str]] = (), remedy: str = _AS_A_DICT
) -> Mapping[str, Any]:
    """Names and values of a saved `Data` or dict, read by allow-list: nothing that the file brings is run.

    Args:
        place: The event, if it is one, and the file.
        further: Classes that stand for names that the file may ask for as well.
        remedy: What makes a file that is read of one that asks for more.

    Raises:
        Problem: If the file asks for more than tensors, numpy values and `Data` (with the names of what it asks for),
            cannot be read, holds something else, or claims more values than fit into it.
    """
    path = Path(str(place.file))
    content = _load(path, place, further, remedy)
    if not isinstance(content, Mapping) and not hasattr(content, "to_dict"):
        raise place.problem(
            f"holds a {type(content).__name__}, expected a torch_geometric Data or a dict of tensors",
            "save each graph in a file of its own: torch.save(data, 'event7.pt')",
        )
    entries: Mapping[str, Any]
    if isinstance(content, Mapping):
        entries = content
    else:  # PyG 1 kept the entries as attributes, and `to_dict` of later versions refuses its objects
        entries = content.to_dict() if "_store" in vars(content) else vars(content)
    for name, value in entries.items():
        # A tensor of stride 0 takes no room until it is used: it may claim more entries than its file has bytes.
        claimed = value.size if isinstance(value, np.ndarray) else value.numel() if hasattr(value, "numel") else 0
        if claimed > (size := path.stat().st_size):
            raise place.problem(f"{name} claims {claimed} values, more than the {size} bytes of the file can hold")
    return entries


def _load(path: Path, place: EventPlace, further: Sequence[tuple[Any, str]], remedy: str) -> object:
    """The content of the file, read without running anything it brings."""
    import torch

    if not path.is_file():
        raise place.problem("no such file")
    with torch.serialization.safe_globals([*_allowed(), *further]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols that the reader then refuses itself
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if _is_script(path):
                what = "refused, nothing of it was run: it is a TorchScript archive, which is a program"
                raise place.problem(what, remedy) from error
            if forbidden := _forbidden(path):
                no_pyg = importlib.util.find_spec("torch_geometric") is None
                of_lightning = any(name.startswith(_LIGHTNING) for name in forbidden)
                if of_lightning and remedy == _AS_A_DICT:
                    remedy = _NO_GRAPH
                raise place.problem(
                    f"refused{', a checkpoint of Lightning' * of_lightning}, nothing of it was run: it asks for "
                    f"{', '.join(forbidden)}",
                    f"only tensors, numpy arrays and plain torch_geometric Data are read; {remedy}"
                    f"{'; to read Data objects, install torch-geometric' if no_pyg else ''}",
                ) from error
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            # torch's own text advises to load the file unsafely; that advice is not passed on.
            reason = "not a pickle of tensors" if isinstance(error, pickle.UnpicklingError) else reason
            raise place.problem(f"cannot be read, {reason}", "is it truncated, or not a file of torch.save?") from error


def _allowed() -> list[Any]:
    """Classes that a file may name: plain PyG containers and numpy's arrays, scalars and types."""
    multiarray = importlib.import_module("numpy._core.multiarray")
    allowed: list[Any] = [np.ndarray, np.dtype, multiarray.scalar, multiarray._reconstruct]
    # Files of numpy 1 name the same functions by their old module.
    allowed += [(multiarray.scalar, "numpy.core.multiarray.scalar")]
    allowed += [(multiarray._reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdUS"]
    # Dicts of tensors can be read without torch_geometric; a Data is then refused by name.
    with contextlib.suppress(ImportError):
        allowed += [pkgutil.resolve_name(name) for name in _ALLOWED_PYG]
    return allowed


def _is_script(path: Path) -> bool:
    """Whether a file is what `torch.jit.save` writes; torch says so with the advice to load it unsafely."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())
    return False


def _forbidden(path: Path) -> list[str]:
    """The names that a file asks for and that are not allowed; empty where the file cannot even be listed."""
    import torch

    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        names: set[str] = set()
        # Files older than torch's zip format are several pickles in a row, then raw bytes, which end the listing.
        with contextlib.suppress(Exception), path.open("rb") as file:
            while True:
                names.update(_globals_of_next_pickle(file))
        return sorted(name for name in names if not name.startswith(_HARMLESS))


def _globals_of_next_pickle(file: IO[bytes]) -> Iterator[str]:
    """The names that a pickle asks for, opcode by opcode, without running any."""
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


def _array(entries: Mapping[str, Any], name: str, place: EventPlace) -> Array:
    value = entries.get(name)
    if value is None:
        what = f"no {name}; found {sorted(map(str, entries))}, expected at least x and edge_index"
        raise place.problem(what, _NO_GRAPH if "state_dict" in entries else "")
    return as_array(value, name, place)


def as_array(value: Any, name: str, place: EventPlace) -> Array:
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
    array: Array = tensor.numpy()
    return array


def _features(entries: Mapping[str, Any], name: str, rows: str, place: EventPlace) -> FloatArray:
    values = _array(entries, name, place)
    values = values[:, None] if values.ndim == 1 else values
    check_array(place, name, values, (rows, "features"))
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return values.astype(np.float32)


def _names(entries: Mapping[str, Any], name: str, columns: int, place: EventPlace) -> tuple[str, ...]:
    """Names of the columns of features: those of the file, where it has them."""
    names = entries.get(f"{name}_names")
    if names is None:
        return tuple(f"{name}{i}" for i in range(columns))
    if not isinstance(names, list | tuple) or not {type(text) for text in names} <= {str} or len(set(names)) != columns:
        raise place.problem(f"{name}_names is {names}, expected {columns} texts, each another one, for {name}")
    return tuple(names)


def _truth(entries: Mapping[str, Any], num_nodes: int, place: EventPlace) -> tuple[IntArray | None, Particles | None]:
    """Particle of each node, and all particles; None where the file does not say."""

    def node_values(name: str, kinds: str) -> Array | None:
        value = entries.get(name)
        if value is None or tuple(getattr(value, "shape", ())) != (num_nodes,) or getattr(value, "is_sparse", False):
            return None
        values = as_array(value, name, place)
        return values if values.dtype.kind in kinds else None

    if (at_nodes := node_values("particle_id", "iu")) is None:
        return None, None
    if len(at_nodes) and at_nodes.min() < 0:
        hint = "nodes of noise have particle_id 0"
        raise place.problem(f"particle_id is {at_nodes.min()} at node {at_nodes.argmin()}", hint)
    at_nodes = at_nodes.astype(np.int64)
    ids, first, index = np.unique(at_nodes, return_index=True, return_inverse=True)
    table = {}
    for name in ("pt", "eta"):
        values = node_values(name, "f")
        if values is not None and not ((values != values[first][index]) & (at_nodes != 0)).any():
            table[name] = values[first][ids != 0]
    return at_nodes, Particles.from_table(ids[ids != 0], table, at_nodes)


def _labels(
    entries: Mapping[str, Any], num_edges: int, num_nodes: int, place: EventPlace
) -> tuple[Array | None, dict[str, Array], dict[str, int | float]]:
    """Labels of the edges, of the nodes by name, and of the graph by name."""
    of_edges: Array | None = None
    of_nodes: dict[str, Array] = {}
    of_graph: dict[str, int | float] = {}
    for entry, value in entries.items():
        match = _LABEL.fullmatch(str(entry))
        if match is None or value is None or (match["of"] == "edge" and match["name"]):
            continue
        of, name = match["of"], match["name"] or "y"
        rows = {"edge": num_edges, "node": num_nodes, "graph": 1}
        if of is None and name != "y" and not _may_be_label(value, (num_nodes, 1)):
            continue  # of a name that begins alike, as other entries may
        values = np.array([value]) if isinstance(value, bool | int | float) else as_array(value, entry, place)
        values = values.reshape(1) if values.ndim == 0 else values
        values = values[:, 0] if values.shape[1:] == (1,) else values
        if of is None:
            fitting = [kind for kind, count in rows.items() if len(values) == count and (name == "y" or kind != "edge")]
            if len(fitting) > 1:
                what = f"{entry} has {len(values)} values, one for each {' and one for each '.join(fitting)}"
                raise place.problem(what, f"name it {' or '.join(f'{kind}_{entry}' for kind in fitting)}")
            of = fitting[0] if fitting else "edge"
        expected = "one label per edge, per node, or one of the graph," if match["of"] is None else f"one per {of},"
        columns = () if of == "edge" or values.ndim == 1 else ("labels",)
        check_array(place, entry, values, (rows[of], *columns), expected, "remove it to go without labels")
        if of == "edge":
            of_edges = values
            continue
        values = values.astype(np.int64) if values.dtype.kind in "biu" else values
        named = {name: values} if values.ndim == 1 else {f"{name}{i}": column for i, column in enumerate(values.T)}
        if twice := set(named) & set(of_nodes if of == "node" else of_graph):
            hint = (
                "name one otherwise: y_NAME and node_y_NAME are labels NAME, node_y_NAME of columns NAME0, NAME1, ..."
            )
            raise place.problem(f"label {min(twice)} is there twice, and {entry} is one of the two", hint)
        if of == "node":
            of_nodes |= named
        else:
            of_graph |= {name: column[0].item() for name, column in named.items()}
    return of_edges, of_nodes, of_graph


def _may_be_label(value: Any, rows: tuple[int, ...]) -> bool:
    """Whether an entry whose name does not say of what it is holds labels: numbers or classes in as many rows."""
    if isinstance(value, bool | int | float):
        return True
    if not hasattr(value, "shape") or getattr(value, "is_sparse", False) or len(value.shape) > 2:
        return False
    if (value.shape[0] if len(value.shape) else 1) not in rows:
        return False
    counts = np.asarray(value)
    return counts.dtype.kind == "f" or bool(((counts >= -1) & (counts < MOST_CLASSES)).all())
