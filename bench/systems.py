"""The systems that benchmarks compare: domainpar on ranks and threads, and the forms of the plain network.

Each run is of fresh processes, so that none holds memory of another, and systems take turns in rounds, so that a busy
moment of the machine does not hit one of them alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import measuring
import numpy as np
import on_ranks
import psutil
from cases import Case
from measuring import Columns, Spread, of, ranks_of, slowest
from on_ranks import Job, Work

from domainpar.common.words import several
from domainpar.nn.stages import MOST_BYTES_OF_LAYERS
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.networks.catalogue import DTYPES, ORDERS
from domainpar.tracking.training.step_memory import DATA_BYTES

GIB = 2**30
BARE = 0.5 * GIB
"""Bytes of a process before it opens a store, roughly: Python, torch, MPI."""

FORMS = ("eager", "checkpoint", "compile")
"""Forms of the plain network: as it is written; with the inputs of each iteration kept and the rest computed again in
backward; through `torch.compile`."""

LARGEST_DIFFERENCE = 1e-5
"""Of losses after equal steps, relative."""


@dataclass(frozen=True)
class Network:
    """An interaction network of two-layer MLPs on an event: all that the memory of a step depends on."""

    num_nodes: int
    num_edges: int
    hidden: int
    graph_iters: int
    node_first: bool = False
    item_bytes: int = 4

    @property
    def node_updates(self) -> int:
        return self.graph_iters if self.node_first else self.graph_iters - 1

    def plain_bytes(self, checkpointed: bool = False) -> int:
        """Predicted peak of a plain step above the bare process, for tables that the allocator gives back when freed.

        Autograd keeps what linear layers and LayerNorms took in and what ReLUs gave out: in an iteration the joined
        table of 3 widths and 4 tables behind it, and gradients of 2 tables at the far end. With checkpoints it keeps
        one state an iteration; one iteration is there as a whole while the step goes back through it, with the
        gradients of its tables.
        Within 3 % of what steps on 400,000 edges took (width 64, 3 and 6 iterations, one thread, CPU).
        """
        inside, encoders, heads, state = 7, 6, 7 if self.node_first else 4, self.hidden * self.item_bytes
        once_more = inside + 6
        grad_edges = encoders + (
            self.graph_iters + once_more if checkpointed else inside * self.graph_iters + heads + 2
        )
        grad_nodes = 4 + (inside + self.node_updates if checkpointed else (inside + 1) * self.node_updates)
        raw = self.num_edges * 40
        return (self.num_edges * grad_edges + self.num_nodes * grad_nodes) * state + raw

    def split_bytes(self, num_nodes: Any, num_edges: Any, recompute_every: int | None = None) -> Any:
        """Predicted peak of domainpar's step above the bare process, on a part, or several, of such sizes.

        `train` weighs pieces of an event instead; this says the same of sizes that nobody has. The peak comes early in
        backward. Kept are the edge states that iterations begin with, but for the first one of the edge-first order,
        which begins with features; of each iteration, per node, its state, the same with ghosts, and two sums. Besides,
        a gradient of edge states, and the working memory of one stage: per node two products of its state, two
        gradients of sums, one of the state and a partial sum. In the node-first order the head takes node states, too:
        one more state of nodes and edges is kept, and products, gradients and partial sums are there twice. Stages keep
        their layers where these are few, if nothing is recomputed.

        Args:
            num_nodes: Owned nodes and ghosts.
            num_edges: Local edges.
            recompute_every: Iterations of which only the first one's input is kept.
        """
        length, first, state = recompute_every or self.graph_iters, self.node_first, self.hidden * self.item_bytes
        starts = range(0, self.graph_iters, length)
        kept = max(number + min(length, self.graph_iters - start) for number, start in enumerate(starts))
        taken = (num_edges * (kept + first) + num_nodes * (4 * kept + 6 + 6 * first)) * state
        mlp = (
            2 * (self.hidden + 1) * self.item_bytes
        )  # of a row; edges: the encoder with an iteration, the head with one
        of_edges = [mlp] * (self.graph_iters + first)
        of_edges[0] += 0 if first else mlp
        of_edges[-1] += mlp + (16 + 1) * self.item_bytes
        for rows, of_row in [*((num_edges, it) for it in of_edges), *((num_nodes, mlp) for _ in of_edges)]:
            if recompute_every is None:
                taken = taken + np.where(rows * of_row <= MOST_BYTES_OF_LAYERS, rows * of_row, 0)
        return taken + DATA_BYTES * (num_nodes + num_edges)

    def plain_scoring_bytes(self) -> int:
        """Predicted peak of a plain pass without gradients, above the bare process.

        It comes in an edge update, which holds the edge states it began with, the states gathered at both ends (2
        widths), these three joined (3), and three tables in the MLP: a norm's input, its result, the activation's.
        Libraries held about one table more. Within 10 % of what passes over 400,000 edges took (width 64, one thread).
        """
        grad_edges, grad_nodes, state = 10, 6, self.hidden * self.item_bytes
        return (self.num_edges * grad_edges + self.num_nodes * grad_nodes) * state + self.num_edges * 40


@dataclass(frozen=True)
class System:
    """One way to take a training step, or to score an event.

    Attributes:
        name: What tables call it.
        allocator: Setting of the C allocator, see `measuring.ALLOCATORS`.
        ranks: Processes that share the event.
        threads: Threads of each.
        form: Form of the plain network; None: domainpar.
        changes: Attributes of domainpar's training that are its own.
    """

    name: str
    allocator: str = "default"
    ranks: int = 1
    threads: int = 1
    form: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        ranks = f"{several(self.ranks, 'rank')} of " if self.form is None else ""
        return f"{self.name}, {ranks}{several(self.threads, 'thread')}, allocator {self.allocator}"

    @property
    def full_precision(self) -> bool:
        """Whether it computes in the same precision as others, so that they have to agree."""
        return "precision" not in self.changes

    @classmethod
    def plain(cls, form: str, allocator: str = "default", threads: int = 1) -> System:
        return cls(f"PyG {form}", allocator, threads=threads, form=form)

    def run(self, job: Job, timeout: float) -> list[dict[str, Any]]:
        """Do the work of a job in processes of its own; returns what each rank says of it."""
        how: Any = {"transport": "mpi", "timeout": timeout}
        job = replace(job, training=replace(job.training, threads=self.threads, **self.changes))
        with measuring.allocator(self.allocator):
            if self.form is None:
                return run_ranks(getattr(on_ranks, job.work), self.ranks, job, **how)
            import plain_pyg  # not above: domainpar is measured without torch_geometric too

            return run_ranks(getattr(plain_pyg, job.work), 1, job, self.form, **how)

    def predicted_bytes(self, network: Network, work: Work = "training_steps") -> int:
        """Peak of all its processes above the bare ones, by formula; of domainpar always that of a training step."""
        if self.form is not None:
            if work == "scoring_passes":
                return network.plain_scoring_bytes()
            return network.plain_bytes(checkpointed=self.form == "checkpoint")
        every = self.changes.get("recompute_every")
        return int(network.split_bytes(network.num_nodes, network.num_edges, every))


@dataclass
class Measured:
    """The runs of one system.

    Attributes:
        system: The system.
        runs: What each rank of each round says.
        problem: Why there are no figures; None where there are.
    """

    system: System
    runs: list[list[dict[str, Any]]] = field(default_factory=list)
    problem: str | None = None

    def values(self, name: str) -> list[float]:
        """Of the slowest rank, the steps of all rounds."""
        return [value for run in self.runs for value in _slowest(run, name)]

    def spread(self, name: str) -> Spread:
        """Of the slowest rank, over the steps of all rounds."""
        return Spread.of(self.values(name))

    def round_medians(self, name: str) -> list[float]:
        """Of the slowest rank, the median step of each round."""
        return [statistics.median(_slowest(run, name)) for run in self.runs]

    def most(self, name: str) -> list[int]:
        """The largest of all rounds, rank by rank."""
        return [max(values) for values in zip(*([rank[name] for rank in run] for run in self.runs))]

    @property
    def above_bare(self) -> list[int]:
        """Peak bytes less those held before the store was opened, rank by rank."""
        return [peak - bare for peak, bare in zip(self.most("peak_rss"), self.most("bare_rss"))]

    def figures(self) -> dict[str, Any]:
        """One row of results."""
        about = {"system": self.system.name, "form": self.system.form, "changes": dict(self.system.changes)}
        about |= {name: getattr(self.system, name) for name in ("allocator", "ranks", "threads")}
        about["problem"] = self.problem
        if self.problem is not None:
            return about
        lists = [name for name, value in self.runs[0][0].items() if isinstance(value, list) and name != "losses"]
        held = [name for name, value in self.runs[0][0].items() if isinstance(value, int)]
        return {
            **about,
            "rounds": len(self.runs),
            **{name: self.spread(name) for name in lists},
            **{name: self.most(name) for name in held},
            "above_bare": self.above_bare,
            "first_step": Spread.of([max(rank["first_step"] for rank in run) for run in self.runs]),
            "losses": self.runs[0][0].get("losses"),
            "sha256": sorted({rank["sha256"] for run in self.runs for rank in run if "sha256" in rank}),
        }


def take_turns(
    systems: Sequence[System], job: Job, network: Network, rounds: int, timeout: float
) -> Iterator[Measured]:
    """Run every system once a round; yields each after each of its runs.

    A system that would not fit into the memory that is free, or a plain one that fails, is given up and says why.
    """
    measured = [Measured(system) for system in systems]
    for _ in range(rounds):
        for of_system in measured:
            if of_system.problem is None:
                _run(of_system, job, network, timeout)
            yield of_system


def network_of(case: Case, training: TrainConfig) -> Network:
    """The first event of a case and the network trained on it, as formulas see them."""
    return Network(
        case.record.num_nodes,
        case.record.num_edges,
        training.hidden,
        training.graph_iters,
        node_first=ORDERS[training.model] == "node-first",
        item_bytes=DTYPES[training.dtype].itemsize,
    )


def loss_difference(system: Measured, other: Measured) -> float:
    """Largest relative difference of two systems' losses, step by step."""
    pairs = zip(system.runs[0][0]["losses"], other.runs[0][0]["losses"], strict=True)
    return max(abs(loss - reference) / abs(reference) for loss, reference in pairs)


def ratio(system: Measured, other: Measured) -> Spread:
    """Seconds of one over those of the other, over rounds."""
    return Spread.of([a / b for a, b in zip(system.round_medians("seconds"), other.round_medians("seconds"))])


def compared(
    allocators: Sequence[str],
    ranks: Sequence[int],
    threads: Sequence[int],
    forms: Sequence[str],
    ours: Mapping[str, Mapping[str, Any]],
) -> list[System]:
    """The systems that a benchmark asks for, allocator by allocator.

    Args:
        allocators: Settings of the C allocator.
        ranks, threads: Of domainpar: each number of ranks with the first number of threads, then the first number of
            ranks with each other number of threads.
        forms: Forms of the plain network, each with each number of threads.
        ours: Changes of domainpar's training, by name of the system.
    """
    layouts = [*((count, threads[0]) for count in ranks), *((ranks[0], count) for count in threads[1:])]
    systems = []
    for allocator in allocators:
        for name, changes in ours.items():
            systems += [System(name, allocator, *layout, changes=changes) for layout in layouts]
        systems += [System.plain(form, allocator, count) for form in forms for count in threads]
    return systems


def ratios(of_system: Measured, measured: Sequence[Measured]) -> dict[str, Any]:
    """How many times faster a system is than others of the same run, over rounds; None where they were not measured.

    Returns:
        `speed_up`: than itself on its first ranks and threads. `than_ranks`: than as many ranks of one thread, where it
        is one rank of several. `than_eager_alike`: than eager PyG with the same allocator, on its first number of
        threads; `than_eager_default`: the same with the default allocator; `than_eager_equal`: with the same allocator
        on as many threads as this system has in all. And `bytes_of_eager`: its peak over that of `than_eager_alike`.
    """
    system = of_system.system
    in_all, alike = system.ranks * system.threads, {"allocator": system.allocator}

    def first(**like: Any) -> Measured | None:
        able = (other for other in measured if other.problem is None)
        return next((other for other in able if all(getattr(other.system, n) == v for n, v in like.items())), None)

    of_threads = system.form is None and system.ranks == 1 < system.threads
    others = {
        "speed_up": first(name=system.name, **alike),
        "than_ranks": first(name=system.name, ranks=in_all, threads=1, **alike) if of_threads else None,
        "than_eager_alike": first(form="eager", **alike),
        "than_eager_default": first(form="eager", allocator="default"),
        "than_eager_equal": first(form="eager", threads=in_all, **alike),
    }
    found: dict[str, Any] = {name: other and ratio(other, of_system) for name, other in others.items()}
    eager = others["than_eager_alike"]
    found["bytes_of_eager"] = sum(of_system.above_bare) / sum(eager.above_bare) if eager else None
    return found


def same_hash(rows: Sequence[Mapping[str, Any]], results: measuring.Results, what: str = "parameters") -> bool:
    """Say whether domainpar's parameters, or scores, came out the same in all rows of one precision."""
    alike: dict[str | None, set[str]] = {}
    for row in rows:
        alike.setdefault(row["changes"].get("precision"), set()).update(row.get("sha256", ()))
    for precision, hashes in alike.items():
        within = f" in {precision}" if precision else ""
        if len(hashes) > 1:
            results.console.print(f"{what.upper()} DIFFER{within}: {len(hashes)} hashes")
        elif hashes:
            results.console.print(f"one hash of all {what}{within}: {min(hashes)}")
    return all(len(hashes) <= 1 for hashes in alike.values())


def _run(measured: Measured, job: Job, network: Network, timeout: float) -> None:
    # An allocator that keeps memory also keeps the holes in it: half as much again was seen.
    kept = 1.5 if measured.system.form is not None and measured.system.allocator != "default" else 1.0
    needed = kept * measured.system.predicted_bytes(network, job.work) + measured.system.ranks * BARE
    free = psutil.virtual_memory().available
    if needed > free:
        measured.problem = f"not run: needs some {needed / GIB:.0f} GiB, {free / GIB:.0f} GiB are free"
        return
    try:
        measured.runs.append(measured.system.run(job, timeout))
    except (RuntimeError, TimeoutError) as error:
        if measured.system.form is None:
            raise
        measured.problem = f"failed: {str(error).strip().splitlines()[-1]}"


def _slowest(run: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return slowest([rank[name] for rank in run])


# --- columns that tables of systems share ----------------------------------------------------------------------------

SYSTEM: Columns = {
    "system": lambda row: row["system"],
    "ranks": ranks_of,
    "threads": lambda row: f"{row['threads']}",
    "allocator": lambda row: row["allocator"],
}
ABOUT_STARS = "* more threads than cores: no measure of scaling."

RATIOS: Columns = {
    "speed-up": of("speed_up", "{:.2f}"),
    "x ranks": of("than_ranks", "{:.2f}"),
    "x eager": of("than_eager_alike", "{:.2f}"),
    "x default": of("than_eager_default", "{:.2f}"),
    "x equal": of("than_eager_equal", "{:.2f}"),
}
ABOUT_RATIOS = (
    "How many times faster, round by round: speed-up, than the first row of this system with this allocator; x ranks, "
    "than as many ranks of one thread; x eager, than eager PyG with the same allocator, its first row; x default, than "
    "eager PyG with the default allocator, its first row; x equal, than eager PyG with the same allocator and as many "
    "threads as this row has in all."
)

MEMORY: Columns = {
    "GiB": lambda row: f"{max(row['above_bare']) / GIB:.2f}",
    "all": lambda row: f"{sum(row['above_bare']) / GIB:.2f}",
    "of eager": lambda row: f"{row['bytes_of_eager']:.2f}" if row["bytes_of_eager"] else "",
}
ABOUT_MEMORY = (
    "GiB: peak of the fullest process less what it held before the store was opened; all: of all processes together; "
    "of eager: this over eager PyG's, same allocator."
)


def where_measured(columns: Columns) -> Columns:
    """The columns, empty in rows of systems that could not be measured, but for their names."""
    return {
        name: read if name in SYSTEM else lambda row, read=read: read(row) if row["problem"] is None else ""
        for name, read in columns.items()
    }
