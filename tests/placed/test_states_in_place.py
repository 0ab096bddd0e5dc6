"""States that are written in place, inside of models and between their calls; what is kept, copied and saved."""

import ast
import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from marks import slow
from torch import nn
from whole_and_split import USUAL, cases, check, gap, sums

from domainpar import NotExact, parallelize, split_graph, split_slices
from domainpar.placed.moves import whole
from domainpar.placed.tensor import Placed
from domainpar.testing import run_ranks


class Sums(nn.Module):
    """Sums at nodes of what lies at the other ends of their edges."""

    def forward(self, x, edge_index, each=1.0):
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] * each)


def in_place(x, edge_index, net):
    state = x * 1
    for _ in range(3):
        state += 0.1 * net(state, edge_index)
    return state


def through_a_view(x, edge_index, net):
    state = x * 1
    left = state[:, :2]
    for _ in range(3):
        left.mul_(0.5).add_(net(state, edge_index)[:, 2:])
    return state


def by_a_mask(x, edge_index, net):
    state = x * 1
    for _ in range(3):
        chosen = torch.arange(13) == 4  # a node of one rank
        state[chosen] += net(state, edge_index)[chosen]
    return net(state, edge_index)


def some_rows(x, edge_index, net):
    state = x * 1
    state[2:7] += net(state, edge_index)[2:7]
    state[[0, 12]] = 0.5
    return net(state, edge_index)


def in_inference_mode(x, edge_index, net):
    with torch.inference_mode():
        state = x.clone()
        for _ in range(3):
            state += 0.1 * net(state, edge_index)
        return state.clone()


def a_copy_of_what_was_written(x, edge_index, net):
    state = x.detach().clone()
    state += net(state, edge_index)
    return net(copy.deepcopy(state), edge_index)


def edges_that_are_written(x, edge_index, e, net):
    first = net(x, edge_index, e)
    e = e * 1
    e *= 2
    return first + net(x, edge_index, e)


def ends_that_are_written(x, edge_index, net):
    first, ends = net(x, edge_index), edge_index.clone()
    ends[0] = ends[1].clone()
    second, ends = net(x, ends), ends.clone()
    ends[:, ends[0] > 6] = 3
    return first + second + net(x, ends)


def kept_from_call_to_call(x, edge_index, net):
    net.state = x if getattr(net, "state", None) is None else net.state
    net.state = net.state + 0.1 * net(net.state, edge_index)
    return net.state


ROLLOUTS = {
    "in place": in_place,
    "through a view": through_a_view,
    "by a mask": by_a_mask,
    "some rows": some_rows,
    "in inference mode": in_inference_mode,
    "a copy of what was written": a_copy_of_what_was_written,
    "edges that are written": edges_that_are_written,
    "ends that are written": ends_that_are_written,
    "kept from call to call": (kept_from_call_to_call, {"calls": 3}),
}


@cases(ROLLOUTS)
def test_a_state_that_is_written_is_read_as_on_one_rank(function, more):
    check(function, net=Sums, **more)


def test_a_copy_of_ghosts_that_was_read_without_gradient_is_not_given_to_a_reader_that_needs_one():
    def two_readers(x, src, dst, e):
        h = sums(x, src, dst, e)
        with torch.no_grad():
            seen = h[src].mean() + (x + h).mean()
        return (h[src] * h[src]).sum(1) + seen, (x + h) * seen

    check(two_readers)


def zeros_of_both_signs(kind, dst, src, x):
    h = torch.zeros(x.size(0), dtype=x.dtype).index_add(0, dst, kind.to(x.dtype) + 1)
    return torch.copysign(h[src], (h * 0.0)[src]), torch.copysign(h[src], (h * -0.0)[src])


def products_in_two_precisions(kind, dst, src, x):
    h = torch.zeros(x.size(0), 1).index_add(0, dst, kind.float()[:, None] + 1) / 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = (h @ h.new_full((1, 2), 0.3))[src]
    return half.double(), (h @ h.new_full((1, 2), 0.3))[src].double()


@pytest.mark.parametrize("function", [zeros_of_both_signs, products_in_two_precisions])
def test_what_differs_is_fetched_apart(function):
    check(function, tolerance=1e-7)


# What is saved


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


class Imputes(nn.Module):
    """Keeps which of its rows had holes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("holes", None)

    def forward(self, x):
        self.holes = x.isnan()
        return x.nan_to_num(0.0)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_every_rank_holds_is_saved_as_plain_tensors_and_rows_and_ranks_are_not(num_ranks):
    assert all(run_ranks(save_what_can_be, num_ranks))


def save_what_can_be(world):
    part = split_graph(USUAL.edge_index, 13, world)
    x = part.nodes(USUAL.x)
    for save in (saved, lambda value: pickle.loads(pickle.dumps(value))):
        for tensor in (part.whole(x), x.mean(0), x.sum()):
            again = save(tensor)
            assert type(again) is torch.Tensor
            assert torch.equal(again, whole(tensor))
        for value in (part, world, {"part": part}):
            with pytest.raises(TypeError, match="belongs to ranks that run now"):
                save(value)
        net = Imputes()
        net(x)
        for value in (x, net.state_dict(), part.edge_index):
            with pytest.raises(NotExact, match=r"part.whole\(tensor\) is the whole one"):
                save(value)
    assert copy.deepcopy(part) is part
    return True


# Settings of a user's torch that could reach into ours


class default_dtype:
    """Another default type inside, for all threads."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


class Mixed(nn.Module):
    """Of many rules those that make tensors."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x, edge_index, kind):
        src, dst = edge_index
        h = x + torch.zeros_like(x).index_add(0, dst, self.linear(x)[src])
        degree = torch.bincount(dst, minlength=x.size(0)).to(x.dtype)[:, None]
        ids, numbers = kind.unique(return_counts=True)
        noise = torch.rand_like(x[0]).mean() + F.gumbel_softmax(x[:3].mean(0)[None], dim=1).sum()
        h = self.dropout(self.norm(h / (1 + degree))) * (ids * numbers).sum()
        return h + x.max(0).values + x.amin() + noise + x.std(0) + (x * h).mean(0)


def trained(world, net, around):
    """The gradients of a step, with something around it."""
    torch.manual_seed(0)
    with around():
        part = split_graph(USUAL.edge_index, 13, world)
        split_slices(USUAL.edge_index.tensor_split(world.size, 1)[world.rank], 13, world)
        model = parallelize(copy.deepcopy(net), world)
        x, kind = part.nodes(USUAL.x.float().numpy()), part.nodes(USUAL.kind[:13].tolist())
        model(x, part.edge_index, kind).square().mean().backward()
        return [it.grad for it in model.parameters()]


@pytest.mark.parametrize("around", [lambda: default_dtype(torch.float64), lambda: default_dtype(torch.float16)])
def test_another_default_type_changes_nothing(around):
    torch.manual_seed(0)
    net = Mixed()
    usual = run_ranks(trained, 2, net, lambda: default_dtype(torch.float32))
    for found, expected in zip(run_ranks(trained, 2, net, around), usual):
        assert all(map(torch.equal, found, expected))


FACTORIES = (
    "arange as_tensor asarray empty empty_strided eye full linspace logspace normal ones rand randint randn randperm "
    "scalar_tensor sparse_coo_tensor tensor zeros"
).split()


def test_every_tensor_that_we_make_says_where():
    root = Path(__file__).parents[2] / "domainpar"
    for file in sorted(file for room in ("parallel", "placed") for file in (root / room).rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in [f"torch.{name}" for name in FACTORIES]:
                given = {keyword.arg for keyword in call.keywords}  # None is **kwargs, of the user
                assert given & {"device", None}, f"{file}:{call.lineno}: {ast.unparse(call)}"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, edge_index):
        return x.max(0).values + torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])


def compiled_steps(world, where, net):
    """The losses of some steps, with the compiler at some place around the model."""
    part = split_graph(USUAL.edge_index, 13, world)
    model = parallel = parallelize(copy.deepcopy(net), world)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    if where == "the model":
        model = torch.compile(parallel, backend="eager")
    if where == "the model itself":
        model.compile(backend="eager")

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(part.nodes(USUAL.x.float()), part.edge_index), part.nodes(USUAL.z.float()))
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = torch.compile(step, backend="eager") if where == "the step" else step
    return [whole(step()) for _ in range(3)]


@pytest.mark.parametrize("where", ["the model", "the model itself", "the step"])
@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_what_is_compiled_around_a_model_leaves_it_as_it_is(num_ranks, where):
    torch.manual_seed(0)
    net = Plain()
    expected = run_ranks(compiled_steps, num_ranks, "nowhere", net)
    for found, theirs in zip(run_ranks(compiled_steps, num_ranks, where, net), expected):
        assert all(gap(one, other) < 1e-6 for one, other in zip(found, theirs))


# Parameters that torch shards


def shard_somewhere(world):
    """What happens to models that are sharded before and after, by each way of torch; and what processes can save."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (world.size,))
    part = split_graph(USUAL.edge_index, 13, world)
    x = part.nodes(USUAL.x.float())

    def before(net):
        fully_shard(net, mesh=mesh)
        parallelize(net, world)

    def of_a_layer(net):
        parallelize(net, world)
        fully_shard(net.linear, mesh=mesh)
        net(x, part.edge_index).sum().backward()

    def of_old(net):
        of_all = parallelize(FullyShardedDataParallel(net, device_id=torch.device("cpu")), world)
        of_all(x, part.edge_index).sum().backward()

    def of_tensors(net):
        parallelize_module(net, mesh, {"linear": ColwiseParallel()})
        parallelize(net, world)

    said = {}
    for shard in (before, of_a_layer, of_old, of_tensors):
        try:
            shard(Plain())
        except Exception as error:
            said[shard.__name__] = f"{type(error).__name__}: {error}"
    assert save_what_can_be(world)
    return said


def test_parameters_that_are_sharded_are_refused_by_name_on_all_ranks_or_end_in_an_error_of_torch():
    for said in run_ranks(shard_somewhere, 2, transport="gloo"):
        assert len(said) == 4, said.keys()
        for name in ("before", "of_tensors"):
            assert "sharded over ranks" in said[name]


def test_placed_tensors_say_what_they_are():
    def work(world):
        part = split_graph(USUAL.edge_index, 13, world)
        x = part.nodes(USUAL.x)
        assert isinstance(x, Placed)
        return repr(x).split(";")[0], f"{x.sum():.3f}", str(x.mean(0)), len(x), tuple(x.shape), x.device.type

    rows = "Placed(shape (13, 4), rows of 13 nodes along dimension 0"
    expected = (rows, f"{USUAL.x.sum():.3f}", str(USUAL.x.mean(0)), 13, (13, 4), "cpu")
    assert run_ranks(work, 3) == [expected] * 3
