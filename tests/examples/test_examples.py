"""The examples print the losses of one rank under mpiexec and torchrun; and what their README says of loops is so."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from marks import slow
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from domainpar import World, parallelize, split_graph
from domainpar.testing import find_mpiexec, run_command, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {"tracking.py": 3, "sphere.py": 4, "power_law.py": 4, "population.py": 3, "molecule.py": 4}
MPIEXEC = find_mpiexec()
# One launch for all: importing torch_geometric costs every rank seconds.
EVERY_EXAMPLE = f"""
import runpy, sys
for name, steps in {STEPS!r}.items():
    sys.argv = [name, "--steps", str(steps)]
    runpy.run_path({str(EXAMPLES)!r} + "/" + name, run_name="__main__")
"""


def losses_in(text):
    return [float(number) for number in re.findall(r"(?:loss|trained on:) (\S+)", text)]


@pytest.fixture(scope="module")
def on_one_rank():
    """What each example prints, run here and alone."""
    pytest.importorskip("torch_geometric")
    printed = {}
    for name, steps in STEPS.items():
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.setattr(sys, "argv", [name, "--steps", str(steps)])
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        torch.set_default_dtype(torch.float32)
        printed[name] = losses_in(output.getvalue())
    return printed


@pytest.fixture(scope="module", params=[slow("2"), slow("4")])
def under_mpiexec(on_one_rank, request):
    if MPIEXEC is None:
        pytest.skip("no mpiexec or no mpi4py")
    code, output = run_command([MPIEXEC, "-n", request.param, sys.executable, "-c", EVERY_EXAMPLE], 120)
    assert code == 0, output
    found = iter(losses_in(output))
    printed = {name: [next(found) for _ in expected] for name, expected in on_one_rank.items()}
    assert list(found) == []
    return printed


@pytest.mark.parametrize("name", STEPS)
def test_an_example_has_at_most_sixty_lines(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("name", STEPS)
def test_ranks_under_mpiexec_print_the_losses_of_one(name, on_one_rank, under_mpiexec):
    assert len(on_one_rank[name]) >= STEPS[name]
    assert under_mpiexec[name] == pytest.approx(on_one_rank[name], rel=1e-10, abs=0)


@pytest.mark.slow
def test_ranks_of_a_process_group_under_torchrun_print_the_losses_of_one(on_one_rank):
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    code, output = run_command([sys.executable, *command, str(EXAMPLES / "sphere.py"), "--steps", "4"], 120)
    assert code == 0, output
    assert losses_in(output) == pytest.approx(on_one_rank["sphere.py"], rel=1e-10, abs=0)


@pytest.mark.parametrize("name", STEPS)
def test_examples_learn_from_the_first_steps(name, on_one_rank):
    losses = on_one_rank[name][: STEPS[name]]
    assert losses[-1] < losses[0]


# --- what the README says of loops -----------------------------------------------------------------------------------

NUM_NODES = 40


class Network(nn.Module):
    """Scores of nodes, of edges and of the graph; with batch norm and dropout."""

    def __init__(self, width=8):
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.of_node, self.of_edge, self.of_graph = nn.Linear(width, 1), nn.Linear(2 * width, 1), nn.Linear(width, 2)

    def forward(self, x, edge_index):
        src, dst = edge_index
        x = self.enter(x)
        for message in self.messages:
            sent = message(torch.cat([x[src], x[dst]], dim=1)).relu()
            x = self.drop(self.norm(x + torch.zeros_like(x).index_add(0, dst, sent)))
        edges = self.of_edge(torch.cat([x[src], x[dst]], dim=1))
        return self.of_node(x).squeeze(1), edges.squeeze(1), self.of_graph(x.mean(0))


class SumOfNeighbours(nn.Module):
    """One layer without chance, for the README's loop."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, edge_index):
        return self.linear(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))


def graph(seed):
    """Features and targets of a random graph: x, edge_index, of nodes, of edges, of the graph."""
    draw = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(NUM_NODES, (2, 150), generator=draw)
    sizes = (NUM_NODES, 3), (NUM_NODES,), (150,), (2,)
    x, *targets = (torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)
    return x, edge_index, *targets


def loss_of(model, world, batch, partitioner="metis"):
    """The loss of nodes, of edges and of the graph."""
    x, edge_index, of_nodes, of_edges, of_graph = batch
    part = split_graph(edge_index, NUM_NODES, world, partitioner=partitioner)
    nodes, edges, whole = model(part.nodes(x), part.edge_index)
    return mse_loss(nodes, of_nodes) + mse_loss(edges, of_edges) + mse_loss(whole, of_graph)


def new_model(world):
    model = parallelize(with_known_weights(Network()), world)
    torch.manual_seed(3)  # for dropout: after all networks are made, whose layers draw from it, too
    return model


def with_known_weights(module):
    """Weights of a generator of their own: ranks that are threads share torch's."""
    draw = torch.Generator().manual_seed(0)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=draw)
    return module


def loop_of_the_readme(world, signs):
    """The loss of the last step of the loop in the README: as it was (signs " -"), or as it is then (" +")."""
    text = (EXAMPLES.parent / "docs/your_model.md").read_text(encoding="utf-8").split("```diff\n")[1].split("```")[0]
    x, edge_index, *_ = graph(0)
    names = {
        "World": SimpleNamespace(from_process_group=lambda: world),
        "Network": lambda: with_known_weights(SumOfNeighbours()),
        "edge_index": edge_index,
        "num_nodes": NUM_NODES,
        "steps": [(x, x.roll(shift, dims=1)) for shift in range(3)],
        "print": lambda loss: names.update(total=loss),
        "parallelize": parallelize,
        "split_graph": split_graph,
        "mse_loss": mse_loss,
        "torch": torch,
    }
    exec("\n".join(line[2:] for line in text.splitlines() if line[0] in signs), names)
    return names["total"]


def test_the_changed_loop_of_the_readme_gives_the_losses_of_the_loop_before():
    before = loop_of_the_readme(None, " -")
    for num_ranks in (1, 3):
        assert run_ranks(loop_of_the_readme, num_ranks, " +") == pytest.approx([before] * num_ranks, rel=1e-12)


def parameters_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(world, wrap=None, partitioner="metis", steps=3):
    """Parameters after three steps of a model, as it is or wrapped."""
    model = new_model(world)
    called = model if wrap is None else wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # unlike Adam it does not hide a factor
    for step in range(steps):
        loss = loss_of(called, world, graph(step), partitioner)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return parameters_of(model)


def largest_difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_losses_of_nodes_edges_and_the_graph_have_the_gradients_of_one_rank():
    alone = train(World.alone())
    for num_ranks in (2, 3, 10):
        for found in run_ranks(train, num_ranks):
            assert largest_difference(found, alone) < 1e-12


def under_ddp(world):
    """Parameters after training without DDP, and under DDP in several ways."""
    in_small_pieces = {"bucket_cap_mb": 0.001}  # so that many reductions start while backward still exchanges
    own_group = {"process_group": dist.new_group()}
    nothing_here = np.zeros(NUM_NODES, np.int64)
    ways = {
        "same group": (in_small_pieces, "metis"),
        "group of its own": (in_small_pieces | own_group, "metis"),
        "a rank without nodes": (in_small_pieces, nothing_here),
    }
    found = {"not wrapped": train(world)}
    for way, (options, partitioner) in ways.items():

        def wrap(model, options=options):
            return DistributedDataParallel(model, **options)

        found[way] = train(world, wrap, partitioner)
    return found


def test_ddp_around_a_parallel_model_changes_nothing():
    alone = train(World.alone())
    for found in run_ranks(under_ddp, 2, transport="gloo"):
        assert {way: gap for way, one in found.items() if not (gap := largest_difference(one, alone)) < 1e-10} == {}


class Task:
    """What a LightningModule of a split graph has."""

    def __init__(self, world):
        self.world, self.model = world, new_model(world)

    def training_step(self, batch):
        return loss_of(self.model, self.world, batch)


def fit(world, accumulate=2, clip=0.5):
    """Automatic optimisation in the order of Lightning's calls, with accumulated and clipped gradients."""
    task = Task(world)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.05)

    def closure(step):
        loss = task.training_step(graph(step)) / accumulate
        if step % accumulate == 0:
            optimizer.zero_grad()
        loss.backward()
        return loss

    def last_closure(step):
        loss = closure(step)
        nn.utils.clip_grad_norm_(task.model.parameters(), clip)
        return loss

    for step in range(3 * accumulate):
        if (step + 1) % accumulate:
            closure(step)
        else:
            optimizer.step(lambda step=step: last_closure(step))
    return parameters_of(task.model)


def test_accumulated_and_clipped_gradients_are_those_of_one_rank_in_the_order_of_lightnings_calls():
    alone = fit(World.alone())
    for found in run_ranks(fit, 3):
        assert largest_difference(found, alone) < 1e-12


def fit_by_lightning(world):
    """`fit`, by Lightning itself: one device a process, no strategy."""
    import lightning

    class LightningTask(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model(world)

        def training_step(self, batch):
            return loss_of(self.model, world, batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.model.parameters(), lr=0.05)

    quiet = dict.fromkeys("logger enable_checkpointing enable_progress_bar enable_model_summary".split(), False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5, **quiet
    )
    task = LightningTask()
    trainer.fit(task, torch.utils.data.DataLoader([graph(step) for step in range(6)], batch_size=None))
    return parameters_of(task.model)


def test_lightning_itself_calls_in_this_order():
    pytest.importorskip("lightning")
    alone = fit(World.alone())
    for found in run_ranks(fit_by_lightning, 2, transport="gloo", timeout=120):
        assert largest_difference(found, alone) < 1e-12
