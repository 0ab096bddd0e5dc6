"""Write a trained network as one file that other programs run: ONNX, as ACTS reads it, or a program of torch.export.

Inputs are x, float32 [nodes, features], edge_index, int64 [2, edges], and edge_attr, float32 [edges, features], if the
network takes them. The output is the raw logit of each edge, float32 [edges, 1]. Names, order and formulas of the
features are in the file's metadata. Before the file gets its name it is run on a whole event, with 1, 2 and 4 threads,
and its logits are compared with those of the network.

Examples:
  python -m domainpar.export                                       the newest run: runs/0001/model.onnx
  python -m domainpar.export runs/0001 --format pt2 --out model.pt2
  python -m domainpar.export pretrained:quickstart --store stores/full --event 000000007
"""

import copy
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import Problem, as_problem
from domainpar.common.words import several
from domainpar.parallel.launcher import started_as_root
from domainpar.tracking.command_line import config_of_run, refuse_like_flags, run_command
from domainpar.tracking.config import ExportConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from domainpar.nn.classifier import EdgeClassifier
    from domainpar.tracking.config import TrainedFlags
    from domainpar.tracking.events.store import EventStore, StoredEvent
    from domainpar.tracking.networks.plain import EdgeLogits

    Floats = npt.NDArray[np.float32]

THREADS = (1, 2, 4)
"""Numbers of threads that a file is tried with."""


Inputs = dict[str, Any]
"""The tables of one event that a network takes, by name, as torch tensors: x, edge_index and maybe edge_attr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line says; returns the exit code."""
    return run_command(ExportConfig, _work, __doc__, argv)


def _work(config: ExportConfig) -> int:
    if not started_as_root():  # nothing is shared: the others have nothing to do
        return 0
    import torch

    from domainpar.common.compiling import watch_compiling

    watch_compiling(talks=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's exporter warns of torch
    with refuse_like_flags("export"):
        export(config)
    return 0


def export(config: ExportConfig) -> Path:
    """Write the file of a run's network, checked on an event; returns its path.

    Raises:
        ValueError: If the network has no such form, a package is missing, or what the file computes is not what we do.
    """
    from domainpar.parallel.world import World
    from domainpar.runs.checkpoint import parameters_sha256
    from domainpar.runs.directory import newest_run, read_run
    from domainpar.tracking.events.own_events import store_of_run
    from domainpar.tracking.events.store import EventStore
    from domainpar.tracking.networks.plain import plain_form
    from domainpar.tracking.training.network import load_network
    from domainpar.tracking.training.pretrained import as_run

    write, run_file = _FORMATS[config.format]()
    run = as_run(config.run) if config.run else newest_run()
    kept = read_run(run).store
    trained = config_of_run(run, config.model)
    store = EventStore(Path(config.store) if config.store else store_of_run(run, kept))
    network, state = load_network(run, trained, config.checkpoint, store, World.alone())
    try:
        # A copy: what is shared keeps its type.
        module = copy.deepcopy(plain_form(network)).float()
    except ValueError as error:
        raise Problem(f"the network of {run} has no exact export: {error}", "train one that has") from error
    metadata = _metadata(run, store, module, parameters_sha256(network), state.step)
    out = Path(config.out or run / f"model.{config.format}")
    seen = {name for name, _ in kept.events["train"]} if kept.events else set()
    with store.open(_event(config, store, seen)) as event:
        inputs = _inputs(event, module.takes_edge_features)
        exact = Exact.of(module, inputs, config.tolerance, event)
        ours = exact.compared("our network computes", _own_logits(network, event, trained))
        partial = out.with_name(f".partial-{out.name}")
        try:
            write(module, inputs, metadata, partial)
            checked = [
                exact.compared(f"with {several(number, 'thread')} the file computes", run_file(partial, inputs, number))
                for number in THREADS
            ]
            os.replace(partial, out)
        except OSError as error:
            if error.filename in (None, str(partial)):  # else it is another file, such as one of torch's compiler
                error.filename = str(out)
            raise as_problem(error) or error from error
        finally:
            partial.unlink(missing_ok=True)
    size, count = out.stat().st_size, sum(parameter.numel() for parameter in module.parameters())
    takes = ", ".join(f"{name} {list(table.shape)}" for name, table in inputs.items())
    print(f"exported: {out}, {size / 1024:,.0f} KiB, {count:,} parameters of step {state.step} ({config.checkpoint})")
    print(f"inputs  : {takes}, of any numbers of nodes and edges; output: logits [edges, 1]")
    print(f"checked : {_checked(exact, checked, ours)}")
    return out


class Exact(NamedTuple):
    """The logits of an event in float64, with which others are compared.

    Attributes:
        logits: Of each edge, float64 [E].
        rounding: How far the same network in float32, in plain torch, is from them.
        allowed: How far others may be.
        event: The event.
        ends: Its `edge_index`.
    """

    logits: "npt.NDArray[np.float64]"
    rounding: float
    allowed: float
    event: "StoredEvent"
    ends: Any

    @classmethod
    def of(cls, module: "EdgeLogits", inputs: Inputs, tolerance: float, event: "StoredEvent") -> "Exact":
        """Those of a module in float32."""
        import numpy as np
        import torch

        from domainpar.tracking.networks.plain import in_float64

        with torch.no_grad():
            rounded = module(**inputs)[:, 0].numpy()
        exact = cls(in_float64(module, inputs)[:, 0].numpy(), 0.0, 0.0, event, inputs["edge_index"])
        # A few edges may all be right by chance: no network's last operation rounds by less than this.
        rounding = max(float(np.finfo(np.float32).eps), *exact.away(rounded)) if len(rounded) else 0.0
        return exact._replace(rounding=rounding, allowed=tolerance * rounding)

    def away(self, logits: "npt.NDArray[np.floating]") -> "npt.NDArray[np.float64]":
        """Difference of each logit over 1 + |logit|; infinite where it is not finite."""
        import numpy as np

        away = np.abs(logits - self.logits) / (1 + np.abs(self.logits))
        return np.where(np.isfinite(away), away, np.inf)

    def compared(self, program: str, logits: "Floats") -> float:
        """How far logits are away.

        Raises:
            Problem: If that is further than allowed, with the worst edge.
        """
        import numpy as np

        if logits.shape != self.logits.shape:
            raise self.event.place.problem(f"{program} logits of shape {logits.shape} for {len(self.logits)} edges")
        if not len(logits):
            return 0.0
        away = self.away(logits)
        worst = int(np.argmax(away))
        if not (np.isfinite(away[worst]) and away[worst] <= self.allowed):
            src, dst = self.ends[:, worst].tolist()
            raise self.event.place.problem(
                f"{program} other logits: largest difference over 1 + |logit| {away[worst]:.1e} at edge {worst} "
                f"({src} -> {dst}): {logits[worst]:.6g} for {self.logits[worst]:.6g} in float64; rounding to float32 "
                f"makes {self.rounding:.1e} here, and allowed are {self.allowed:.1e}",
                "of rounding alone: a larger --tolerance; else please tell us",
            )
        return float(away[worst])


def _checked(exact: Exact, differences: Sequence[float], ours: float) -> str:
    """What was compared, in words."""
    if not len(exact.logits):
        return f"event {exact.event.event_id} has no edges: nothing to compare"
    return (
        f"{len(exact.logits):,} edges of event {exact.event.event_id} with {', '.join(map(str, THREADS))} threads; "
        f"largest difference from float64 over 1 + |logit| {max(differences):.1e}, of our own logits {ours:.1e}; "
        f"allowed {exact.allowed:.1e}"
    )


def _event(config: ExportConfig, store: "EventStore", seen: set[str]) -> Any:
    """The event that the file is checked on."""
    records = store.readable()
    if config.event is not None:
        records = [record for record in records if record.event == config.event]
    if not records:
        raise Problem(f"store {store.path} has no event {config.event or 'that can be read'}", "name one with --event")
    return next((record for record in records if record.event not in seen), records[0])


def _inputs(event: "StoredEvent", takes_edge_features: bool) -> Inputs:
    """The tables of an event in the order of its store."""
    import numpy as np
    import torch

    nodes, edges = np.arange(event.num_nodes), np.arange(event.num_edges)
    ends = np.stack([event.read_edges(name, edges) for name in ("src", "dst")]).astype(np.int64)
    x, edge_attr = event.read_nodes("features", nodes), event.read_edges("features", edges)
    tables = {"x": x.astype(np.float32), "edge_index": ends}
    if takes_edge_features:
        tables["edge_attr"] = edge_attr.astype(np.float32)
    return {name: torch.from_numpy(table) for name, table in tables.items()}


def _own_logits(network: "EdgeClassifier", event: "StoredEvent", trained: "TrainedFlags") -> "Floats":
    """Our logits of all edges, in the order of the store."""
    import torch

    from domainpar.parallel.world import World
    from domainpar.tracking.networks.catalogue import DTYPES
    from domainpar.tracking.part_loading import load_part

    part = load_part(event, World.alone().domain, dtype=DTYPES[trained.dtype])
    with torch.no_grad():
        logits = network(part.graph, part.halo)
    ids = torch.from_numpy(part.graph.plan.edge_ids)
    ours: Floats = torch.empty(event.num_edges).index_copy(0, ids, logits.float()).numpy()
    return ours


def _metadata(run: Path, store: "EventStore", module: "EdgeLogits", sha256: str, step: int) -> dict[str, str]:
    """What a reader needs to know, as strings."""
    from domainpar import __version__

    features: dict[str, Sequence[Any]] = {}
    for of in ("node_features", "edge_features")[: 1 + module.takes_edge_features]:
        features[of] = list(store.feature_names if of == "node_features" else store.edge_feature_names)
        definitions = store.feature_definitions[of]
        features[f"{of}_divided_by"] = [divisor for divisor, _ in definitions]
        features[f"{of}_formula"] = [formula for _, formula in definitions]
    values = {
        **features, "output": "logits; the score is their sigmoid", "producer": f"domainpar {__version__}",
        "parameters_sha256": sha256, "step": step, "run": run.name,
    }  # fmt: skip
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


Write = Callable[["EdgeLogits", Inputs, dict[str, str], Path], None]
RunFile = Callable[[Path, Inputs, int], "Floats"]


def _program(module: "EdgeLogits", inputs: Inputs) -> Any:
    """The module as torch.export traces it.

    Raises:
        Problem: If a call of it cannot be traced, with its name.
    """
    import torch

    nodes, edges = torch.export.Dim("nodes", min=1), torch.export.Dim("edges", min=1)
    variable = {"x": {0: nodes}, "edge_index": {1: edges}, "edge_attr": {0: edges}}
    shapes = {name: variable[name] for name in inputs}
    try:
        program = torch.export.export(module, (), inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # of a user's own code: anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Problem(f"the network cannot be exported: {first}", "torch.export has to follow its forward") from error
    for graph in (part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)):
        for node in graph.nodes:
            node.meta.pop("stack_trace", None)  # which names files of this machine
    return program


def _pt2() -> tuple[Write, RunFile]:
    import torch

    def write(module: "EdgeLogits", inputs: Inputs, metadata: dict[str, str], path: Path) -> None:
        content = io.BytesIO()  # torch's own writer of files ends the process where a disk is full
        torch.export.save(_program(module, inputs), content, extra_files={"metadata.json": json.dumps(metadata)})
        write_whole(path, content.getvalue())

    def run(path: Path, inputs: Inputs, threads: int) -> "Floats":
        module = torch.export.load(path).module()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                logits: Floats = module(**inputs)[:, 0].numpy()
        finally:
            torch.set_num_threads(before)
        return logits

    return write, run


def _onnx() -> tuple[Write, RunFile]:
    os.environ.setdefault(
        "ORT_DISABLE_TELEMETRY", "1"
    )  # it would write into the home, and complain of one that is closed
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise Problem(
            f"ONNX takes the packages onnx, onnxscript and onnxruntime, and {error.name} is not here",
            "pip install 'domainpar[export]', or take --format pt2",
        ) from error
    import torch

    from domainpar.tracking.networks.plain import sums_in_order

    # It warns about operations of another package.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)

    def write(module: "EdgeLogits", inputs: Inputs, metadata: dict[str, str], path: Path) -> None:
        program = sums_in_order(_program(module, inputs))
        try:
            exported: Any = torch.onnx.export(
                program,
                input_names=list(inputs),
                output_names=["logits"],
                dynamo=True,
                verbose=False,
                external_data=False,
            )
        except Exception as error:
            raise Problem(
                f"the network has no ONNX: {str(error).strip().splitlines()[0]}", "try --format pt2"
            ) from error
        _refuse_lost_sums(exported.model)
        exported.model.metadata_props.update(metadata)
        exported.save(path, external_data=False)

    def run(path: Path, inputs: Inputs, threads: int) -> "Floats":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        logits: Floats = session.run(None, {name: table.numpy() for name, table in inputs.items()})[0][:, 0]
        return logits

    return write, run


def _refuse_lost_sums(model: Any) -> None:
    """Refuse a form of sums in which threads of ONNX runtime add to one number at the same time."""
    for node in (node for graph in (model.graph, *model.functions.values()) for node in graph.all_nodes()):
        reduction = node.attributes.get("reduction")
        if node.op_type == "ScatterND" and reduction is not None and reduction.as_string() != "none":
            raise Problem(
                f"the network adds to rows in a form that ONNX runtime loses numbers in ({node.name or node.op_type})",
                "sum by index_add or scatter_add rather than by index_put(accumulate=True), or take --format pt2",
            )


_FORMATS: dict[str, Callable[[], tuple[Write, RunFile]]] = {"onnx": _onnx, "pt2": _pt2}


if __name__ == "__main__":
    sys.exit(main())
