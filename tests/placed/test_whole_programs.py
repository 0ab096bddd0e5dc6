"""Programs around a model, as users write them: right on any number of ranks, or refused in words."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import domainpar
from domainpar import NotExact, parallelize, split_graph
from domainpar.common.agreement import Refused
from domainpar.testing import patient, run_ranks

N, E = 60, 300
DRAW = torch.Generator().manual_seed(1)
EDGES = torch.randint(N, (2, E), generator=DRAW)
X, Y = torch.randn(N, 4, generator=DRAW), torch.randn(N, 4, generator=DRAW)
RANKS = (1, 3)


class Net(nn.Module):
    """Two rounds of messages; its parts are methods that programs call by themselves."""

    def __init__(self, clip=None):
        super().__init__()
        self.a, self.b, self.clip = nn.Linear(4, 4), nn.Linear(4, 4), clip

    def encode(self, x, e):
        h = torch.zeros_like(x).index_add(0, e[1], self.a(x).tanh()[e[0]])
        if self.clip == "norm" and h.requires_grad:
            h.register_hook(lambda g: g / (g.norm() + 1e-3))
        if self.clip == "clamp" and h.requires_grad:
            h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return torch.zeros_like(h).index_add(0, e[1], self.b(h).tanh()[e[0]])

    def forward(self, x, e):
        return self.a(self.encode(x, e))


def made(*args):
    torch.manual_seed(3)
    return Net(*args).double()


NET = {clip: made(clip) for clip in (None, "norm", "clamp")}


def on_ranks(work, *args):
    """What every number of ranks gives, all ranks of it."""
    return [got for size in RANKS for got in run_ranks(work, size, *args, timeout=20)]


def placed(world, net=None):
    """A part, the net made parallel, and node features and targets in float64."""
    part = split_graph(EDGES, N, world)
    net = parallelize(copy.deepcopy(NET[None] if net is None else net), world)
    return part, net, part.nodes(X.double()), part.nodes(Y.double())


def close(ours, theirs):
    largest = float(theirs.nan_to_num().abs().max())
    return torch.allclose(ours, theirs, rtol=0, atol=1e-12 * max(1.0, largest), equal_nan=True)


METHODS = {
    "encode": lambda net, x, e: net.encode(x, e),
    "forward": lambda net, x, e: net.forward(x, e),
    "a submodule alone": lambda net, x, e: net.b(x),
    "arithmetic around the model": lambda net, x, e: x + 0.1 * net(x, e),
    "rows by a list": lambda net, x, e: net(x, e)[torch.arange(20)],
    "as many rows as there are": lambda net, x, e: net(x, e)[: len(x)],
    "the first row": lambda net, x, e: net(x, e)[0],
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_submodules_and_arithmetic_outside_are_as_on_one_rank(name):
    def work(world):
        part, net, x, _ = placed(world)
        return part.whole(METHODS[name](net, x, part.edge_index)).detach()

    expected = METHODS[name](NET[None], X.double(), EDGES).detach()
    assert all(close(got, expected) for got in on_ranks(work))


HOOKS = {
    "of a parameter": lambda net: net.a.weight.register_hook(lambda g: g.clamp(-2e-3, 2e-3)),
    "after accumulation": lambda net: net.a.weight.register_post_accumulate_grad_hook(
        lambda p: (p.grad.clamp_(-2e-3, 2e-3), None)[1]
    ),
    "of a module": lambda net: net.b.register_full_backward_hook(
        lambda m, gi, go: tuple(g if g is None else g.sign() * 1e-3 for g in gi)
    ),
    "norm": lambda net: None,
    "clamp": lambda net: None,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_are_registered_late_see_whole_figures(name):
    net = NET.get(name, NET[None])

    def learn(net, x, e, y):
        HOOKS[name](net)
        for _ in range(2):
            net.zero_grad()
            F.mse_loss(net(x, e), y).backward()
        return net.a.weight.grad.clone()

    def work(world):
        part, mine, x, y = placed(world, net)
        return learn(mine, x, part.edge_index, y)

    expected = learn(copy.deepcopy(net), X.double(), EDGES, Y.double())
    assert all(close(got, expected) for got in on_ranks(work))


@pytest.mark.parametrize("given", [True, False])
def test_learned_weights_of_losses_beside_the_model_are_those_of_one_rank(given):
    def learn(net, sigma, x, e, y):
        optimizer = torch.optim.SGD([*net.parameters(), sigma], 0.1)
        for _ in range(30):
            optimizer.zero_grad()
            h = net(x, e)
            losses = torch.stack([F.mse_loss(h, y), F.l1_loss(h, y)])
            ((-sigma).exp() * losses + sigma).sum().backward()
            optimizer.step()
        return torch.cat([sigma.detach(), *[p.detach().flatten() for p in net.parameters()]])

    def work(world):
        part = split_graph(EDGES, N, world)
        sigma = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        net = parallelize(copy.deepcopy(NET[None]), world, beside=[sigma] if given else [])
        return learn(net, sigma, part.nodes(X.double()), part.edge_index, Y.double())

    sigma = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    expected = learn(copy.deepcopy(NET[None]), sigma, X.double(), EDGES, Y.double())
    assert all(close(got, expected) for got in on_ranks(work))


C = torch.randint(4, (N,), generator=DRAW)
C[::3] = -1
SKEW = torch.full((N,), -100)
SKEW[EDGES[1, :20]] = 1
W = torch.tensor([0.1, 2.0, 5.0, 0.5]).double()
P = torch.randn(N, 4, generator=DRAW).softmax(1).double()
B = (torch.randn(N, 4, generator=DRAW) > 0).double()
NAN = Y.double().clone()
NAN[::4, 1] = float("nan")
NAN[EDGES[1, :30]] = float("nan")
TARGETS = {"C": C, "SKEW": SKEW, "P": P, "B": B, "S": B * 2 - 1, "Y": Y.double(), "NAN": NAN}
LOSSES = {
    "ignored classes": lambda h, t: F.cross_entropy(h, t["C"], ignore_index=-1),
    "ignored classes and weights": lambda h, t: F.cross_entropy(h, t["C"], weight=W, ignore_index=-1),
    "ignored on most ranks": lambda h, t: F.cross_entropy(h, t["SKEW"]),
    "smoothed": lambda h, t: F.cross_entropy(h, t["C"], weight=W, ignore_index=-1, label_smoothing=0.1),
    "soft classes": lambda h, t: F.cross_entropy(h, t["P"], weight=W),
    "sums": lambda h, t: F.cross_entropy(h, t["C"], ignore_index=-1, reduction="sum"),
    "nll": lambda h, t: F.nll_loss(h.log_softmax(1), t["C"], weight=W, ignore_index=-1),
    "bce": lambda h, t: F.binary_cross_entropy_with_logits(h, t["B"], pos_weight=W),
    "bce of probabilities": lambda h, t: F.binary_cross_entropy(h.sigmoid(), t["B"], weight=t["P"]),
    "kl": lambda h, t: F.kl_div(h.log_softmax(1), t["P"], reduction="batchmean"),
    "huber": lambda h, t: F.huber_loss(h, t["Y"], delta=0.3),
    "smooth l1": lambda h, t: F.smooth_l1_loss(h, t["Y"]),
    "l1": lambda h, t: F.l1_loss(h, t["Y"]),
    "weighted": lambda h, t: F.mse_loss(h, t["Y"], weight=t["P"]),
    "poisson": lambda h, t: F.poisson_nll_loss(h, t["B"], full=True),
    "gauss": lambda h, t: F.gaussian_nll_loss(h, t["Y"], h.exp()),
    "margins of classes": lambda h, t: F.multi_margin_loss(h, t["C"].clamp(0), weight=W),
    "soft margins of labels": lambda h, t: F.multilabel_soft_margin_loss(h, t["B"], weight=W),
    "soft margins": lambda h, t: F.soft_margin_loss(h, t["S"]),
    "ranking": lambda h, t: F.margin_ranking_loss(h[:, 0], h[:, 1], t["S"][:, 0], 0.1),
    "hinge": lambda h, t: F.hinge_embedding_loss(h, t["S"]),
    "cosine": lambda h, t: F.cosine_embedding_loss(h, t["Y"], t["S"][:, 0]),
    "triplet": lambda h, t: F.triplet_margin_loss(h, t["Y"], t["P"]),
    "of a mask": lambda h, t: F.cross_entropy(h[t["C"] >= 0], t["C"][t["C"] >= 0], weight=W),
    "where known": lambda h, t: ((h - t["NAN"]) ** 2)[~t["NAN"].isnan()].mean(),
    "of known rows": lambda h, t: ((h - t["NAN"]) ** 2)[~t["NAN"].isnan().any(1)].mean(),
    "focal": lambda h, t: (
        (1 - (-F.cross_entropy(h, t["C"], ignore_index=-1, reduction="none")).exp()) ** 2
        * F.cross_entropy(h, t["C"], ignore_index=-1, reduction="none")
    )[t["C"] >= 0].mean(),
    "balanced": lambda h, t: F.cross_entropy(
        h, t["C"].clamp(0), weight=1 / (torch.bincount(t["C"].clamp(0), minlength=4) + 1.0).double()
    ),
    "r2": lambda h, t: 1 - ((h - t["Y"]) ** 2).sum() / ((t["Y"] - t["Y"].mean(0)) ** 2).sum(),
    "correlation": lambda h, t: ((h - h.mean(0)) * (t["Y"] - t["Y"].mean(0))).sum() / (h.std() * t["Y"].std()),
    "covariance": lambda h, t: ((h - h.mean(0)).T @ (h - h.mean(0)) / (len(h) - 1)).sum(),
    "variance": lambda h, t: F.relu(1 - h.var(0).add(1e-4).sqrt()).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_is_that_of_one_rank_with_placed_targets_and_with_whole_ones(name):
    def learn(net, x, edges, targets):
        net.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = LOSSES[name](net(x, edges), targets)
        loss.backward()
        return torch.cat([loss.detach().reshape(1), net.a.weight.grad.flatten()])

    def work(world):
        part, net, x, _ = placed(world)
        of_part = {key: part.nodes(target) for key, target in TARGETS.items()}
        return [learn(net, x, part.edge_index, targets) for targets in (of_part, TARGETS)]

    expected = learn(copy.deepcopy(NET[None]), X.double(), EDGES, TARGETS)
    assert all(close(got, expected) for both in on_ranks(work) for got in both)


def test_figures_are_whole_numbers_that_one_rank_may_look_at():
    def work(world):
        part, net, x, y = placed(world)
        with torch.no_grad():
            out = net(x, part.edge_index)
            accuracy = (out.argmax(1) == y.argmax(1)).float().mean()
            table = torch.bincount(out.argmax(1) * 4 + y.argmax(1), minlength=16).view(4, 4)
            shares = out.mean(0)
        if world.is_root:  # no rank waits for the others here
            figures = [
                accuracy.item(),
                float(shares[0]),
                f"{accuracy:.3f}",
                str(table),
                len(out),
                shares.numpy().tolist(),
            ]
            return [*figures, table.tolist()]
        return None

    out = NET[None](X.double(), EDGES)
    accuracy = (out.argmax(1) == Y.argmax(1)).float().mean()
    for size in RANKS:
        got = run_ranks(work, size, timeout=20)[0]
        assert got[0] == accuracy.item()
        assert got[2] == f"{accuracy:.3f}"
        assert got[4] == N
        assert np.allclose(got[5], out.mean(0).tolist(), rtol=1e-12)
        assert got[6] == torch.bincount(out.argmax(1) * 4 + Y.argmax(1), minlength=16).view(4, 4).tolist()
        assert got[3] == str(torch.tensor(got[6]))


def test_what_a_program_does_with_rows_it_does_not_hold_is_refused_in_words():
    def work(world):
        part, net, x, _ = placed(world)
        out = net(x, part.edge_index)
        said = []
        for use in (lambda: out.detach().numpy(), lambda: out.tolist(), lambda: torch.save(out.detach(), io.BytesIO())):
            with pytest.raises(NotExact, match=r"part\.whole\(tensor\)") as refused:
                use()
            said.append(str(refused.value))
        torch.save(part.whole(out).detach(), io.BytesIO())
        loaded = pickle.loads(pickle.dumps((out**2).mean().detach()))
        assert type(loaded) is torch.Tensor
        return said

    assert len({str(said) for said in run_ranks(work, 3, timeout=20)}) == 1


def test_the_users_module_has_nothing_of_ours_in_it_after_training(tmp_path):
    def work(world):
        part, net, x, y = placed(world)
        F.mse_loss(net(x, part.edge_index), y).backward()
        return net

    (net,) = run_ranks(work, 1, timeout=20)
    expected = net(X.double(), EDGES)
    assert close(pickle.loads(pickle.dumps(net))(X.double(), EDGES), expected)
    assert close(copy.deepcopy(net)(X.double(), EDGES), expected)
    assert not [key for module in net.modules() for key in vars(module) if "domainpar" in key]
    torch.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "warm.pt")
    plain = parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), domainpar.World.alone())
    torch.save(plain, tmp_path / "net.pt")
    read = (
        "import sys; sys.modules['domainpar'] = None; import torch; "
        f"print(type(torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False)).__name__)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", read], capture_output=True, text=True, timeout=patient(100), check=False
    )
    assert ended.stdout == "Sequential\n", ended.stderr


X64 = X.numpy()
ARRAYS = {
    "big-endian": X64.astype(">f4"),
    "backwards": X64[::-1].copy()[::-1],
    "a list": X64.tolist(),
    "a frame": pd.DataFrame(X64),
    "transposed": torch.tensor(X64.T.copy()).T,
    "half": X.bfloat16(),
}
NOT_ARRAYS = {
    "sparse": (X.to_sparse(), r"x\.to_dense"),
    "objects": (X64.astype(object), "of object"),
    "text": (np.array([["a"] * 4] * N), "of <U1"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_as_programs_have_them_are_taken(name):
    def work(world):
        part = split_graph(EDGES, N, world)
        return part.nodes(ARRAYS[name]).double().sum().item()

    expected = (
        torch.as_tensor(np.asarray(ARRAYS[name], dtype=np.float64)).sum()
        if name != "half"
        else X.bfloat16().double().sum()
    )
    assert on_ranks(work) == pytest.approx([float(expected)] * sum(RANKS), rel=1e-12)


@pytest.mark.parametrize("name", NOT_ARRAYS)
def test_what_is_no_array_of_numbers_is_refused_with_its_type(name):
    given, text = NOT_ARRAYS[name]

    def work(world):
        part = split_graph(EDGES, N, world)
        with pytest.raises(ValueError, match=text):
            part.nodes(given)

    for size in (1, 3):
        run_ranks(work, size, timeout=20)


GRAPHS = {
    "a float": ((EDGES, 60.0), {}, "pass an integer"),
    "a tensor of a float": ((EDGES, torch.tensor(60.0)), {}, "pass an integer"),
    "text": ((EDGES, "60"), {}, "pass an integer"),
    "nothing": ((EDGES, None), {}, "pass an integer"),
    "a negative number": ((EDGES, -1), {}, "0 or more"),
    "parts of floats": ((EDGES, N), {"partitioner": [0.5] * N}, "integers"),
    "parts of text": ((EDGES, N), {"partitioner": ["a"] * N}, "partitioner"),
    "no partitioner": ((EDGES, N), {"partitioner": None}, "partitioner"),
    "an unknown partitioner": ((EDGES, N), {"partitioner": "nosuch"}, "choose one of"),
    "a float as a seed": ((EDGES, N), {"seed": 1.5}, "seed is 1.5"),
    "a large seed": ((EDGES, N), {"seed": 2**70}, r"below 2\*\*63"),
    "a position of text": ((EDGES, N), {"position": [["a"] * 3] * N, "partitioner": "phi"}, "position"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_wrong_arguments_is_refused_by_all_ranks_at_once(name, size):
    args, more, text = GRAPHS[name]

    def work(world):
        with pytest.raises(Refused, match=text):
            split_graph(*args, world, **more)

    run_ranks(work, size, timeout=10)


@pytest.mark.parametrize("size", RANKS)
def test_masks_made_twice_select_the_same_rows(size):
    kinds, first = torch.arange(E) % 3, torch.arange(N) < 20

    def run(net, x, e, kind, mask):
        some = torch.zeros_like(x).index_add(0, e[:, kind == 0][1], x[e[:, kind == 0][0]])
        new = net.a(x).clone()
        new[~mask] = net.b(x)[~mask].tanh()
        return new + some

    def work(world):
        part, net, x, _ = placed(world)
        out = run(net, x, part.edge_index, part.edges(kinds), part.nodes(first))
        with_whole = run(net, x, part.edge_index, kinds, first)
        return part.whole(out).detach(), part.whole(with_whole).detach()

    expected = run(NET[None], X.double(), EDGES, kinds, first).detach()
    for both in run_ranks(work, size, timeout=20):
        assert all(close(got, expected) for got in both)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.d = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, e):
        return torch.zeros_like(x).index_add(0, e[1], self.d(self.a(x - self.mean))[e[0]])


def eval_on_one(world, net, loss):
    if world.is_root:
        net.eval()
    return loss


def buffer_of_one(world, net, loss):
    if world.is_root:
        net.mean.add_(1.0)
    return loss


def nothing_of_one(world, net, loss):
    return loss * 0 if world.rank == 1 else loss


def scaled_by_rank(world, net, loss):
    return loss / (1 + world.rank)


def weight_of_one(world, net, loss):
    if world.is_root:
        with torch.no_grad():
            net.a.weight.mul_(1.01)
    return loss


MISTAKES = {
    "eval() on one rank": (eval_on_one, "do not make the same calls"),
    "a buffer of one rank": (buffer_of_one, r"mean, \(4,\) float32"),
    "a loss of 0 on one rank": (nothing_of_one, "mul"),
    "a loss scaled by the rank": (scaled_by_rank, "div"),
    "a weight of one rank": (weight_of_one, r"a.weight, \(4, 4\) float32"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_one_rank_does_by_itself_ends_all_with_what_it_was(name):
    mistake, text = MISTAKES[name]
    torch.manual_seed(0)
    net = Dropping()

    def work(world):
        part = split_graph(EDGES, N, world)
        mine, x, y = parallelize(copy.deepcopy(net), world), part.nodes(X), part.nodes(Y)
        for _ in range(3):
            mine.zero_grad()
            mistake(world, mine, F.mse_loss(mine(x, part.edge_index), y)).backward()

    with pytest.raises((Refused, RuntimeError), match=text):
        run_ranks(work, 2, timeout=10)


OLD = {
    "owned_nodes": "part.nodes", "owned_edges": "part.edges", "node_mean_share": "mse_loss", "all_reduce": "item",
    "replicate": "the tensor itself", "edge_mean_share": "mean",
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_names_of_before_say_the_new_form(name):
    part = split_graph(EDGES, N, domainpar.World.alone())
    with pytest.raises(AttributeError, match=OLD[name]):
        getattr(part, name)
    with pytest.raises(AttributeError, match="returns the module itself"):
        domainpar.GraphParallel  # noqa: B018
    with pytest.raises(TypeError, match="sums at both ends are exact"):
        split_graph(EDGES, N, domainpar.World.alone(), edge_policy="incident")


def test_a_module_may_be_made_parallel_again_in_another_world():
    modules = [copy.deepcopy(NET[None]) for _ in range(2)]

    def work(world):
        part = split_graph(EDGES, N, world)
        net = parallelize(modules[world.rank], world)
        net.zero_grad()
        net(part.nodes(X.double()), part.edge_index).square().mean().backward()
        return net.a.weight.grad.clone()

    (one,) = run_ranks(work, 1, timeout=20)
    assert all(close(got, one) for got in run_ranks(work, 2, timeout=20))


@pytest.mark.parametrize("name", ["seed", "node_parameters", "recompute_every"])
def test_arguments_of_before_say_the_new_form(name):
    with pytest.raises(TypeError, match="has no argument"):
        parallelize(Net(), domainpar.World.alone(), **{name: 1})
