"""Write a trained network as one file that other programs run: ONNX, as ACTS reads it, or a program of torch.export.

Inputs are x, float32 [nodes, features], edge_index, int64 [2, edges], and edge_attr, float32 [edges, features], if the
network takes them; the output is a raw logit of each edge, float32 [edges, 1]. Names and order of the features are in
the file's metadata. The file is run on a whole event and compared with our own logits before it gets its name.

Examples:
  python -m domainpar.export                                       the newest run: runs/0001/model.onnx
  python -m domainpar.export runs/0001 --format pt2 --out model.pt2
  python -m domainpar.export pretrained:quickstart --store stores/full --event 000000007
"""

import copy
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from domainpar.command_line import config_of_run, named, refused_as_asked, run_command
from domainpar.config import ExportConfig
from domainpar.parallel.launcher import started_as_root
from domainpar.problems import NotWritten, Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from domainpar.config import TrainConfig
    from domainpar.events.store import EventStore, StoredEvent
    from domainpar.nn.classifier import EdgeClassifier
    from domainpar.nn.plain import EdgeLogits

    Floats = npt.NDArray[np.float32]

INPUTS = ("x", "edge_index", "edge_attr")


class Inputs(NamedTuple):
    """The tables of one event, as torch tensors."""

    x: Any
    edge_index: Any
    edge_attr: Any


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line says; returns the exit code."""
    return run_command(ExportConfig, _work, __doc__, named(sys.argv[1:] if argv is None else argv))


def _work(config: ExportConfig) -> int:
    if not started_as_root():  # nothing is shared: the others have nothing to do
        return 0
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's exporter warns of torch
    with refused_as_asked("export"):
        export(config)
    return 0


def export(config: ExportConfig) -> Path:
    """Write the file of a run's network, checked on an event; returns its path.

    Raises:
        ValueError: If the network has no such form, a package is missing, or what the file computes is not what we do.
    """
    from domainpar.events.own_events import store_of_run
    from domainpar.events.store import EventStore
    from domainpar.nn.plain import plain_form
    from domainpar.parallel.world import World
    from domainpar.training.checkpoint import parameters_sha256
    from domainpar.training.network import load_network
    from domainpar.training.pretrained import as_run
    from domainpar.training.rundir import newest_run, read_run

    write, run_file = _FORMATS[config.format]()
    run = as_run(config.run) if config.run else newest_run()
    about = read_run(run)
    trained = config_of_run(run, config.model)
    store = EventStore(Path(config.store) if config.store else store_of_run(run, about))
    network, state = load_network(run, trained, config.checkpoint, store, World.alone())
    try:
        # A copy: what is shared keeps its type.
        module = copy.deepcopy(plain_form(network, len(store.edge_feature_names))).float()
    except ValueError as error:
        raise Problem(f"the network of {run} has no exact export: {error}", "train one that has") from error
    metadata = _metadata(run, store, module, parameters_sha256(network), state.step)
    out = Path(config.out or run / f"model.{config.format}")
    seen = {name for name, _ in (about["store"].get("events") or {}).get("train", [])}
    with store.open(_event(config, store, seen)) as event:
        inputs, expected = _inputs(event), _own_logits(network, event, trained)
        partial = out.with_name(f".partial-{out.name}")
        try:
            write(module, inputs, metadata, partial)
            difference = compared(run_file(partial, inputs), expected, config.tolerance, event, inputs)
            os.replace(partial, out)
        except OSError as error:
            raise NotWritten(f"cannot write {out}: {error.strerror}", "choose another --out") from error
        finally:
            partial.unlink(missing_ok=True)
    size, count = out.stat().st_size, sum(parameter.numel() for parameter in module.parameters())
    takes = ", ".join(f"{name} {list(table.shape)}" for name, table in _given(module, inputs).items())
    print(f"exported: {out}, {size / 1024:,.0f} KiB, {count:,} parameters of step {state.step} ({config.checkpoint})")
    print(f"inputs  : {takes}, of any numbers of nodes and edges; output: logits [edges, 1]")
    print(f"checked : {difference}")
    return out


def compared(found: "Floats", expected: "Floats", tolerance: float, event: "StoredEvent", inputs: Inputs) -> str:
    """How far logits of a file are from ours, in words.

    Raises:
        Problem: If they are further than allowed, with the worst edge.
    """
    import numpy as np

    if found.shape != expected.shape:
        raise event.place.problem(f"the file gives logits of shape {found.shape} for {len(expected)} edges")
    away = np.abs(found - expected) / (1 + np.abs(expected))
    if not len(away):
        return f"event {event.event_id} has no edges: nothing to compare"
    worst = int(np.nanargmax(np.where(np.isfinite(away), away, np.inf)))
    src, dst = inputs.edge_index[:, worst].tolist()
    words = f"{away[worst]:.1e} at edge {worst} ({src} -> {dst}): {found[worst]:.6g} for {expected[worst]:.6g}"
    if not away[worst] <= tolerance:
        raise event.place.problem(
            f"the file computes other logits: largest difference over 1 + |logit| {words}; allowed are {tolerance:g}",
            "of rounding alone: a larger --tolerance; else please tell us",
        )
    return f"{len(away):,} edges of event {event.event_id}, largest difference over 1 + |logit| {words}"


def _event(config: ExportConfig, store: "EventStore", seen: set[str]) -> Any:
    """The event that the file is checked on."""
    records = store.readable()
    if config.event is not None:
        records = [record for record in records if record.event == config.event]
    if not records:
        raise Problem(f"store {store.path} has no event {config.event or 'that can be read'}", "name one with --event")
    return next((record for record in records if record.event not in seen), records[0])


def _inputs(event: "StoredEvent") -> Inputs:
    """An event in the order of its store."""
    import numpy as np
    import torch

    nodes, edges = np.arange(event.num_nodes), np.arange(event.num_edges)
    ends = np.stack([event.read_edges(name, edges) for name in ("src", "dst")]).astype(np.int64)
    features = event.read_nodes("features", nodes), event.read_edges("features", edges)
    x, edge_attr = (torch.from_numpy(table.astype(np.float32)) for table in features)
    return Inputs(x, torch.from_numpy(ends), edge_attr)


def _own_logits(network: "EdgeClassifier", event: "StoredEvent", trained: "TrainConfig") -> "Floats":
    """Our logits of all edges, in the order of the store."""
    import torch

    from domainpar.parallel.part_loading import load_part
    from domainpar.parallel.world import World
    from domainpar.training.network import DTYPES

    part = load_part(event, World.alone().domain, dtype=DTYPES[trained.dtype])
    with torch.no_grad():
        logits = network(part.graph, part.halo)
    ids = torch.from_numpy(part.graph.plan.edge_ids)
    ours: Floats = torch.empty(event.num_edges).index_copy(0, ids, logits.float()).numpy()
    return ours


def _given(module: "EdgeLogits", inputs: Inputs) -> dict[str, Any]:
    """The tables that the module takes, by name."""
    return dict(list(inputs._asdict().items())[: 3 if module.takes_edge_features else 2])


def _metadata(run: Path, store: "EventStore", module: "EdgeLogits", sha256: str, step: int) -> dict[str, str]:
    """What a reader needs to know, as strings."""
    from domainpar import __version__

    names = {"node_features": list(store.feature_names)}
    if module.takes_edge_features:
        names["edge_features"] = list(store.edge_feature_names)
    values = {
        **names, "output": "logits; the score is their sigmoid", "producer": f"domainpar {__version__}",
        "parameters_sha256": sha256, "step": step, "run": run.name,
    }  # fmt: skip
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _dynamic(module: "EdgeLogits", inputs: Inputs) -> dict[str, Any]:
    """Which sizes may be others: those of nodes and of edges."""
    import torch

    nodes, edges = torch.export.Dim("nodes", min=1), torch.export.Dim("edges", min=1)
    shapes = {"x": {0: nodes}, "edge_index": {1: edges}, "edge_attr": {0: edges}}
    return {name: shapes[name] for name in _given(module, inputs)}


Write = Callable[["EdgeLogits", Inputs, dict[str, str], Path], None]
RunFile = Callable[[Path, Inputs], "Floats"]


def _program(module: "EdgeLogits", inputs: Inputs) -> Any:
    """The module as torch.export traces it.

    Raises:
        Problem: If a call of it cannot be traced, with its name.
    """
    import torch

    shapes = _dynamic(module, inputs)
    try:
        return torch.export.export(module, (), _given(module, inputs), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # of a user's own code: anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Problem(f"the network cannot be exported: {first}", "torch.export has to follow its forward") from error


def _pt2() -> tuple[Write, RunFile]:
    import torch

    def write(module: "EdgeLogits", inputs: Inputs, metadata: dict[str, str], path: Path) -> None:
        torch.export.save(_program(module, inputs), path, extra_files={"metadata.json": json.dumps(metadata)})

    def run(path: Path, inputs: Inputs) -> "Floats":
        module: Any = torch.export.load(path).module()
        taken = len(module.graph.find_nodes(op="placeholder"))
        with torch.no_grad():
            found: Floats = module(**dict(list(inputs._asdict().items())[:taken]))[:, 0].numpy()
        return found

    return write, run


def _onnx() -> tuple[Write, RunFile]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise Problem(
            f"ONNX takes the packages onnx, onnxscript and onnxruntime, and {error.name} is not here",
            "pip install 'domainpar[export]', or take --format pt2",
        ) from error
    import torch

    # It tells of operations of a package that nobody asked for.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)

    def write(module: "EdgeLogits", inputs: Inputs, metadata: dict[str, str], path: Path) -> None:
        program = _program(module, inputs)
        names = list(_given(module, inputs))
        try:
            made: Any = torch.onnx.export(
                program, input_names=names, output_names=["logits"], dynamo=True, verbose=False, external_data=False
            )
        except Exception as error:
            raise Problem(
                f"the network has no ONNX: {str(error).strip().splitlines()[0]}", "try --format pt2"
            ) from error
        made.model.metadata_props.update(metadata)
        made.save(path, external_data=False)

    def run(path: Path, inputs: Inputs) -> "Floats":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]
        feed = {name: table.numpy() for name, table in zip(names, inputs)}
        found: Floats = session.run(None, feed)[0][:, 0]
        return found

    return write, run


_FORMATS: dict[str, Callable[[], tuple[Write, RunFile]]] = {"onnx": _onnx, "pt2": _pt2}


if __name__ == "__main__":
    sys.exit(main())
