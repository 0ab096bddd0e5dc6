"""Settings of a user's torch that could reach into ours: default device and type, its compiler, sparse gradients."""

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from torch import nn
from whole_and_split import USUAL

from domainpar import parallelize, split_graph, split_slices
from domainpar.testing import run_ranks

ROOMS = ("domainpar/parallel", "domainpar/nn/adapt")
FACTORIES = (
    "arange as_tensor asarray empty empty_strided eye full linspace logspace normal ones rand randint randn randperm "
    "scalar_tensor sparse_coo_tensor tensor zeros"
).split()


class Net(nn.Module):
    """Of many rules those that make tensors."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x, edge_index, kind):
        src, dst = edge_index
        h = x + torch.zeros_like(x).index_add(0, dst, self.linear(x)[src])
        degree = torch.bincount(dst, minlength=x.size(0)).to(x.dtype)[:, None]
        counts = torch.bincount(kind, minlength=3).to(x.dtype)
        ids, numbers = kind.unique(return_counts=True)
        noise = torch.rand_like(x[0]).mean() + F.gumbel_softmax(x[:3].mean(0)[None], dim=1).sum()
        h = self.dropout(self.norm(h / (1 + degree))) * counts.sum() * (ids * numbers).sum()
        return h + x.max(0).values + x.amin() + noise + x.std(0) + (x * h).mean(0)


def trained(world, net, around):
    """The gradients of a step, with something around it."""
    with around():
        of_all = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
        ends = USUAL.edge_index.tensor_split(world.size, 1)[world.rank]
        split_slices(ends, USUAL.num_nodes, world)
        model = parallelize(copy.deepcopy(net), world)
        x, kind = of_all.nodes(USUAL.x.float().numpy()), of_all.nodes(USUAL.kind[: USUAL.num_nodes].tolist())
        of_all.node_mean_share(model(x, of_all.edge_index, kind) ** 2).backward()
        model.reduce_gradients()
        return [it.grad for it in model.parameters()]


class default_dtype:
    """Another default type inside, for all threads."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self):
        return self

    def __enter__(self):
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [lambda: torch.device("meta"), default_dtype(torch.float64), default_dtype(torch.float16)],
    ids=["device", "float64", "float16"],
)
def test_another_default_device_or_type_changes_nothing(around):
    torch.manual_seed(0)
    net = Net()
    usual = run_ranks(trained, 2, net, lambda: torch.device("cpu"))
    for found, expected in zip(run_ranks(trained, 2, net, around), usual):
        assert all(map(torch.equal, found, expected))


def test_every_tensor_that_we_make_says_where():
    root = Path(__file__).parents[3]
    for file in sorted(file for room in ROOMS for file in (root / room).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in [f"torch.{name}" for name in FACTORIES]:
                given = {keyword.arg for keyword in call.keywords}  # None is **kwargs, of the user
                assert given & {"device", None}, f"{file}:{call.lineno}: {ast.unparse(call)}"


def compiled_step(world, where, net):
    """The loss after some steps, with the compiler at some place around the model."""
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    model = parallel = parallelize(copy.deepcopy(net), world)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    if where == "the model":
        model = torch.compile(parallel, backend="eager")
    if where == "the model itself":
        model.compile(backend="eager")

    def step():
        optimizer.zero_grad()
        kind = part.replicate(torch.tensor([0, 1, 2]))
        result = model(part.nodes(USUAL.x.float()), part.edge_index, kind)
        loss = part.node_mean_share((result - part.owned_nodes(USUAL.z.float())) ** 2)
        loss.backward()
        parallel.reduce_gradients()
        optimizer.step()
        return part.all_reduce(loss)

    step = torch.compile(step, backend="eager") if where == "the step" else step
    return [step() for _ in range(3)]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, edge_index, kind):
        return x.max(0).values + torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])


def test_a_torch_that_lacks_what_a_watch_asks_is_left_as_it_is(monkeypatch):
    from torch.utils import checkpoint

    from domainpar.nn.adapt import transforms

    monkeypatch.delattr(checkpoint, "_checkpoint_without_reentrant_generator")
    usual = torch.compile, checkpoint.CheckpointFunction.apply
    for _ in range(2):  # each time, and not the first alone
        with pytest.raises(AttributeError), transforms.run_as_written(lambda: None):
            pass
    assert (torch.compile, checkpoint.CheckpointFunction.apply) == usual


@pytest.mark.parametrize("where", ["the model", "the model itself", "the step"])
@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_what_is_compiled_around_a_parallel_model_leaves_it_as_it_is(num_ranks, where):
    torch.manual_seed(0)
    net = Plain()
    expected = run_ranks(compiled_step, num_ranks, "nowhere", net)
    assert run_ranks(compiled_step, num_ranks, where, net) == expected


class Kinds(nn.Module):
    """States by a table of which most rows are never read, and one by one rank alone."""

    def __init__(self):
        super().__init__()
        self.of_kind, self.linear = nn.Embedding(9, 4, sparse=True).double(), nn.Linear(4, 4).double()

    def forward(self, kind, edge_index):
        x = self.of_kind(kind)
        return x + torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])


def sparse_steps(world, net, kind, optimizer_of):
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    model = parallelize(copy.deepcopy(net), world)
    optimizer = optimizer_of([model.module.of_kind.weight])
    for step in range(3):
        model.zero_grad()
        result = model(part.nodes((kind + step).clamp(max=6)), part.edge_index)
        part.node_mean_share(result**2).backward()
        model.reduce_gradients()
        with pytest.raises(RuntimeError, match="summed over ranks before"):
            model.reduce_gradients()
        optimizer.step()
    return model.module.of_kind.weight.grad, model.module.of_kind.weight.detach()


def sparse_steps_of_torch(net, kind, optimizer_of):
    net = copy.deepcopy(net)
    optimizer = optimizer_of([net.of_kind.weight])
    for step in range(3):
        optimizer.zero_grad()
        (net((kind + step).clamp(max=6), USUAL.edge_index) ** 2).mean().backward()
        optimizer.step()
    return net.of_kind.weight.grad.coalesce(), net.of_kind.weight.detach()


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_that_are_sparse_stay_so(num_ranks, optimizer):
    torch.manual_seed(0)
    net, kind = Kinds(), USUAL.kind[: USUAL.num_nodes].clone()
    kind[3] = 5
    expected = sparse_steps_of_torch(net, kind, optimizer)
    for gradient, weight in run_ranks(sparse_steps, num_ranks, net, kind, optimizer):
        torch.testing.assert_close((gradient, weight), expected, rtol=1e-12, atol=1e-14)
