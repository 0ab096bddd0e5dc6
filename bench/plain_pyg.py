"""The competitor: the same interaction networks as an ordinary user of torch_geometric writes them.

Each update gathers the states at both ends of all edges, joins them into one table, runs the MLP on it and scatters:
no tiles, no padding, everything kept for backward. Parameters have the names and shapes of domainpar's networks, so
that a `state_dict` of one loads into the other. Edges come in the order of the store, sorted by where they end, which
is the order that suits gathers and sums best.

Processes import this file by name, as they do `on_ranks.py`; the forms are those of `systems.FORMS`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from on_ranks import Job
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from domainpar.measure.forecast import peak_rss_bytes
from domainpar.parallel.world import World
from domainpar.tracking.events.store import EventStore, WholeEvent
from domainpar.tracking.networks import catalogue as ours


class PlainMLP(nn.Module):
    """Linear layers, each followed by LayerNorm and ReLU; a last width of 1 is left linear.

    One that updates states ends in its last norm.
    """

    def __init__(self, *widths: int, updates: bool = False) -> None:
        super().__init__()
        self.updates = updates
        self.linears = nn.ModuleList(nn.Linear(wide, out) for wide, out in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths[1:] if width > 1)

    def forward(self, rows: Tensor) -> Tensor:
        last = len(self.linears) - 1
        for layer, (linear, norm) in enumerate(zip_longest(self.linears, self.norms)):
            rows = linear(rows)
            if norm is not None:
                rows = norm(rows) if self.updates and layer == last else F.relu(norm(rows))
        return rows


class RowUpdate(nn.Module):
    """An MLP on rows that need nothing from elsewhere: nodes, or edges alone."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.mlp = PlainMLP(*widths)

    def forward(self, rows: Tensor) -> Tensor:
        return self.mlp(rows)


class EdgeUpdate(MessagePassing):
    """`mlp([x_src, x_dst, e])`, added to e if that is a state to be updated."""

    def __init__(self, *widths: int, updates: bool = False) -> None:
        super().__init__()
        self.mlp = PlainMLP(*widths, updates=updates)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        new = self.edge_updater(edge_index, x=x, e=e)
        return e + new if self.mlp.updates else new

    def edge_update(self, x_j: Tensor, x_i: Tensor, e: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_j, x_i, e], dim=1))


class NodeUpdate(MessagePassing):
    """`x + mlp([x, sum of e at dst, sum of e at src])`, each sum divided by the root of its number of edges."""

    def __init__(self, *widths: int) -> None:
        super().__init__(aggr="sum")
        self.mlp = PlainMLP(*widths, updates=True)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, scales: Sequence[Tensor]) -> Tensor:
        size = (x.size(0), x.size(0))
        at_dst = self.propagate(edge_index, e=e, size=size) * scales[0]
        at_src = self.propagate(edge_index.flip(0), e=e, size=size) * scales[1]
        return x + self.mlp(torch.cat([x, at_dst, at_src], dim=1))

    def message(self, e: Tensor) -> Tensor:
        return e


class PlainInteraction(nn.Module):
    """Scores every edge of an event; see `domainpar.nn.interaction_module.InteractionModule` for the definition.

    Args:
        node_features: Features of a node.
        edge_features: Features of an edge; may be 0.
        hidden: Width of both states.
        graph_iters: Number of iterations.
        node_first: The order: node states before edge states, or after them.
        checkpointed: Keep only the inputs of each iteration for backward.
    """

    def __init__(
        self,
        node_features: int,
        edge_features: int,
        hidden: int,
        graph_iters: int,
        node_first: bool = False,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        widths = (hidden, hidden)
        self.node_first, self.checkpointed = node_first, checkpointed
        self.node_encoder = RowUpdate(node_features, *widths)
        self.edge_encoder = EdgeUpdate(2 * hidden + edge_features, *widths)
        self.edge_stages = nn.ModuleList(EdgeUpdate(3 * hidden, *widths, updates=True) for _ in range(graph_iters))
        num_node_updates = graph_iters if node_first else graph_iters - 1
        self.node_stages = nn.ModuleList(NodeUpdate(3 * hidden, *widths) for _ in range(num_node_updates))
        self.head = EdgeUpdate(3 * hidden, *widths, 1) if node_first else RowUpdate(hidden, *widths, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Logits of all edges, [num_edges]."""
        x = self.node_encoder(x)
        e = self.edge_encoder(x, edge_index, edge_attr)
        scales = [degree.clamp(min=1).rsqrt() for degree in self._degrees(x, edge_index, e)]
        iteration = self._node_first if self.node_first else self._edge_first
        if self.checkpointed:
            iteration = partial(checkpoint, iteration, use_reentrant=False)
        for edge_stage, node_stage in zip_longest(self.edge_stages, self.node_stages):
            x, e = iteration(edge_stage, node_stage, x, edge_index, e, scales)
        logits = self.head(x, edge_index, e) if self.node_first else self.head(e)
        return logits.squeeze(1)

    @staticmethod
    def _degrees(x: Tensor, edge_index: Tensor, e: Tensor) -> list[Tensor]:
        """The number of edges at each node, as `dst` and as `src`, [num_nodes, 1]."""
        return [torch.bincount(end, minlength=x.size(0)).to(x.dtype)[:, None] for end in (edge_index[1], edge_index[0])]

    @staticmethod
    def _edge_first(
        edge_stage: EdgeUpdate,
        node_stage: NodeUpdate | None,
        x: Tensor,
        edge_index: Tensor,
        e: Tensor,
        scales: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        e = edge_stage(x, edge_index, e)
        # The last update of the nodes would reach no logit.
        return (x if node_stage is None else node_stage(x, edge_index, e, scales)), e

    @staticmethod
    def _node_first(
        edge_stage: EdgeUpdate,
        node_stage: NodeUpdate,
        x: Tensor,
        edge_index: Tensor,
        e: Tensor,
        scales: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        x = node_stage(x, edge_index, e, scales)
        return x, edge_stage(x, edge_index, e)


def make_network(job: Job, form: str = "eager") -> PlainInteraction:
    """The plain network with the initial weights of domainpar's, to be run as it is or compiled."""
    store, training = EventStore(job.store), job.training
    staged = ours.make_network(training, store)
    widths = len(store.feature_names), len(store.edge_feature_names), training.hidden, training.graph_iters
    network = PlainInteraction(*widths, node_first=staged.node_first, checkpointed=form == "checkpoint")
    network.to(ours.DTYPES[training.dtype]).load_state_dict(staged.state_dict())
    return network


def read_event(path: Path, dtype: str, number: int = 0) -> Data:
    """An event of a store, by its number, as people hand it to torch_geometric."""
    store, dtype_of_rows = EventStore(path), ours.DTYPES[dtype]
    with store.open(store.events()[number]) as event:
        nodes, edges = np.arange(event.num_nodes), np.arange(event.num_edges)
        ends = np.stack([event.read_edges("src", edges), event.read_edges("dst", edges)])
        return Data(
            x=torch.from_numpy(event.read_nodes("features", nodes)).to(dtype_of_rows),
            edge_index=torch.from_numpy(ends).to(torch.int64),
            edge_attr=torch.from_numpy(event.read_edges("features", edges)).to(dtype_of_rows),
            y=torch.from_numpy(event.read_edges("label", edges)).to(dtype_of_rows),
        )


def training_steps(world: World, job: Job, form: str) -> dict[str, Any]:
    """The same figures as `on_ranks.training_steps`, of a plain form: trained in this process alone.

    Loss and optimiser are those of domainpar's trainer at its default weights, which are 1 for every edge.
    """
    bare = peak_rss_bytes()
    torch.set_num_threads(job.training.threads or 1)
    warnings.filterwarnings("ignore", module="torch_geometric")
    network, event = make_network(job, form), read_event(job.store, job.training.dtype)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    trained = torch.compile(network, dynamic=False) if form == "compile" else network

    def loss() -> Tensor:
        logits = trained(event.x, event.edge_index, event.edge_attr)
        return F.binary_cross_entropy_with_logits(logits, event.y, reduction="sum") / event.num_edges

    steps = [timed_step(optimizer, loss) for _ in range(job.warmup + job.repeats)]
    measured = steps[job.warmup :]
    return {
        "losses": [step["loss"] for step in steps],
        "first_step": steps[0]["seconds"],
        **{name: [step[name] for step in measured] for name in ("seconds", "forward", "backward", "reduce")},
        "bare_rss": bare,
        "peak_rss": peak_rss_bytes(),
    }


def timed_step(optimizer: Any, loss_of: Callable[[], Any]) -> dict[str, float]:
    """One training step of a plain torch network: its loss, and seconds of forward, backward, optimiser and all."""
    times = [time.perf_counter()]
    optimizer.zero_grad()
    loss = loss_of()
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    phases = zip(("forward", "backward", "reduce"), (end - begin for begin, end in pairwise(times)))
    return {"loss": loss.item(), "seconds": times[-1] - times[0], **dict(phases)}


def scoring_passes(world: World, job: Job, form: str) -> dict[str, Any]:
    """The same figures as `on_ranks.scoring_passes`, of a plain form; there is no `whole`: its event lies in memory."""
    bare = peak_rss_bytes()
    torch.set_num_threads(job.training.threads or 1)
    warnings.filterwarnings("ignore", module="torch_geometric")
    event = read_event(job.store, job.training.dtype)
    network = make_network(job, form).eval()
    scoring = torch.compile(network, dynamic=False) if form == "compile" else network
    seconds = []
    for _ in range(job.warmup + job.repeats):
        began = time.perf_counter()
        with torch.no_grad():
            logits = scoring(event.x, event.edge_index, event.edge_attr)
        seconds.append(time.perf_counter() - began)
    peak, store = peak_rss_bytes(), EventStore(job.store)  # what follows is for the comparison
    with store.open(store.events()[0]) as stored:
        in_order = logits.numpy()[WholeEvent(stored).edge_ids]
    figures = {"seconds": seconds[job.warmup :], "first_step": seconds[0], "logits": in_order}
    return {**figures, "bare_rss": bare, "peak_rss": peak}
