"""What goes past the rules: hooks, functions of one's own, recomputation, tensors kept from call to call."""

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint
from whole_and_split import cases, check, refusals, trial_of

from domainpar import World
from domainpar.nn.adapt import transforms
from domainpar.nn.adapt.calls import name_of
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.watch import RULES, rule, watching
from domainpar.testing import run_command


def sums(x, src, dst, e):
    return x.new_zeros(x.size(0), 4).index_add(0, dst, x[src] * e)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunction():
            return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class InPlace(nn.Module):
    """Looks like a layer that passes messages, and changes what it is given."""

    node_dim = 0

    def propagate(self):
        raise NotImplementedError

    def forward(self, h, src):
        h.mul_(2.0)
        return h[src]


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = InPlace()

    def forward(self, h, src):
        ends = self.layer(h, src)
        return h, ends + h[src]


class Keeping(nn.Module):
    """Buffers made anew, changed in place, tensors in lists and dictionaries, and node states of the last call."""

    def __init__(self):
        super().__init__()
        self.last = None
        self.register_buffer("running", torch.zeros(4))
        self.listed = [torch.ones(4, dtype=torch.float64)]
        self.named = {"a": torch.full((4,), 2.0, dtype=torch.float64)}
        self._private = torch.full((4,), 3.0, dtype=torch.float64)

    def forward(self, x):
        y = x if self.last is None else x + self.last
        self.last = (y * 0.5).detach()
        self.running = self.running * 0.9 + x.detach().mean(0)
        self.running.add_(1.0)
        return y * self.running * self.listed[0] * self.named["a"]


class Private(Keeping):
    def forward(self, x):
        return x * self._private


class Reused(nn.Module):
    """Frees a buffer, so that what comes from where nobody knows may lie where it lay."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros(4))

    def forward(self, x):
        self.number = self.number + 1
        kept = [Hidden.apply(x) for _ in range(200)]
        return sum((one * 1).sum(0) for one in kept) + self.number


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x, some):
        return {"nodes": self.frozen(self.used(x)), "graph": [x.mean(0)], "some": self.used(x[some])}


def without_gradient_first(function):
    """A function whose values are asked for without gradient before it is called."""

    def twice(x, src, dst, e, mask):
        h = sums(x, src, dst, e)
        with torch.no_grad():
            first = function(x, h, src, mask).abs().sum()
        return function(x, h, src, mask) * first

    return twice


def hooked(x, src):
    y = x * 1
    y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return y[src]


def hooked_constant(x, c):
    d = c * 1
    d.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return d * x


def cached(reentrant):
    def read(x, src, dst, e):
        h = sums(x, src, dst, e)
        return h[src] + checkpoint(lambda h, src: h[src] ** 2, h, src, use_reentrant=reentrant)

    return read


def again(function, reentrant):
    def run(x, src, dst, e):
        return checkpoint(function, x * 1, src, dst, e, use_reentrant=reentrant)

    return run


def of_two_lengths(reentrant):
    def multiply(x, src, dst, e):
        return checkpoint(lambda x, h: x * h, x * 1, sums(x, src, dst, e), use_reentrant=reentrant)

    return multiply


def masked_again(reentrant):
    return lambda x, mask: checkpoint(lambda x: x[mask] * 2, x * 1, use_reentrant=reentrant)


def noisy(reentrant):
    return lambda x: checkpoint(lambda x: F.dropout(x, 0.5) ** 2, x * 1, use_reentrant=reentrant)


def noisy_uniform(reentrant):
    return lambda x: checkpoint(lambda x: torch.rand_like(x) * x**2, x * 1, use_reentrant=reentrant)


def layer_again(reentrant):
    return lambda x, net: checkpoint(net, x * 1, use_reentrant=reentrant)


def asked_for_gradient(x, src):
    h = x.detach().clone()
    h.requires_grad = True
    return h[src] * x[src]


@torch.jit.script
def scripted_softplus(x):
    return F.softplus(x) - 0.5


@torch.jit.script
def scripted_centre_(x):
    return x.sub_(x.mean(0))


@torch.compile
def compiled_relu(x, y):
    return torch.relu(x) + y


def hidden(function, tensor, *args):
    """What an extension does to a tensor: no torch call that can be watched."""
    with torch._C.DisableTorchFunction():
        return function(tensor, *args)


EXACT = {
    "buffers and states kept from call to call": (lambda x, net: net(x), {"net": Keeping, "calls": 3}),
    "unused, frozen and shared parameters; nested results": (
        lambda x, batch, net: net(x, batch == 2),
        {"net": Several},
    ),
    "results that nothing is made of": lambda x, src, dst, e: (sums(sums(x, src, dst, e), src, dst, e).detach(), x * 2),
    "one tensor used twice": lambda x, src, dst, e: (lambda h: (h[src] * h[dst], h * x, h.sum(0)))(
        sums(x, src, dst, e)
    ),
    "nothing but a sum": lambda x: x.sum(),
    "None, numbers and words among results": lambda x: (x, [x * 2], {"a": (x.sum(),)}),
    "no gradient": lambda x, src, dst, e: x * torch.no_grad()(lambda: sums(sums(x, src, dst, e), src, dst, e))(),
    "steps computed again": (layer_again(False), {"net": lambda: nn.Linear(4, 4)}),
    "sums computed again": again(lambda x, src, dst, e: sums(sums(x, src, dst, e), src, dst, e), False),
    "means computed again": lambda x: checkpoint(lambda x: x - x.mean(0), x * 1, use_reentrant=False),
    "means computed again, the old way": lambda x: checkpoint(lambda x: x - x.mean(0), x * 1, use_reentrant=True),
    "a gradient asked for by assignment": asked_for_gradient,
    "scripts": lambda x, src, dst, e: scripted_softplus(sums(scripted_softplus(x), src, dst, e)),
    "scripts that change their argument": lambda x: scripted_centre_(x * 1) * 2,
    "compiled functions": lambda x, src, dst, e: compiled_relu(sums(x, src, dst, e), x),
    "compiled layers": (lambda x, net: net(x), {"net": lambda: torch.compile(nn.Linear(4, 4))}),
    "zeros of both signs": lambda x, src: (
        1 / torch.full_like(x, 0.0).detach()[src] + 2 / torch.full_like(x, -0.0).detach()[src],
        x.sum(),
    ),
    "two functions of one name": lambda mask, z, src, x: (
        x * 1,
        (torch.where(mask, z[:, 0] > 0, mask)[src], mask.where(z[:, 0] > 0, mask)[src]),
    ),
}

ALONE = {  # torch draws other numbers than the watch
    "two draws of one tensor": lambda x, src: [F.dropout(x.detach(), 0.5)[src] for _ in range(2)],
    "two masks": lambda x: sum(x[torch.rand(x.size(0)) > 0.3].mean(0) for _ in range(4)),
    "two masks of edges": lambda x, edge_index, src: [
        (lambda kept: x.new_zeros(x.size(0), 4).index_add(0, kept[1], x[kept[0]]))(
            edge_index[:, torch.rand(src.size(0)) > 0.3]
        )
        for _ in range(2)
    ],
    "random numbers like others": lambda x, src: (x[src].sum(), torch.rand_like(x)[src]),
}

REFUSED = {
    "traced scripts": (lambda x: SCRIPT(x) * 2, "traced"),
    "gradients within": (lambda x: torch.autograd.grad((x**2).sum(), x, create_graph=True)[0] * 2, "autograd.grad"),
    "parameters made of rows": (lambda x: nn.Parameter(x.detach()).sum(0), "nobody knows"),
    "addresses of rows": (lambda x: x * (x.data_ptr() > 0), "data_ptr"),
    "changes behind the watch": (lambda x: hidden(Tensor.sub_, x * 1, x.mean(0)) * 2, "changed in place where"),
    "changes behind the watch of a view": (
        lambda x: (lambda h: (hidden(Tensor.mul_, h[:, :2], 3), h * 2)[1])(x * 1),
        "changed in place where",
    ),
    "changes behind the watch of a result": (
        lambda x: (lambda h: (hidden(Tensor.mul_, h, 3), h)[1])(x * 1),
        "changed in place where",
    ),
    "changes behind the watch of what every rank has": (
        lambda x: (lambda total: (hidden(Tensor.add_, total, len(x.detach().clone())), total * 2)[1])(x.sum(0) * 1),
        "changed in place where",
    ),
    "changes behind the watch of a buffer": (
        lambda x, net: (hidden(Tensor.add_, net.running_mean, 1), x)[1],
        "changed in place where",
        {"net": lambda: nn.BatchNorm1d(4)},
    ),
    "tensors of the module's file": (lambda x: x * GLOBAL, "nobody knows"),
    "batched functions": (lambda x: torch.vmap(lambda row: row - row.mean())(x) * 2, ""),
    "an unknown call": (lambda x: torch.cov(x), "tell us"),
    "an attribute set": (lambda x: setattr(x, "data", x * 2), ""),
}

SCRIPT = torch.jit.trace(lambda x: x - x.mean(0), torch.ones(13, 4))
GLOBAL = torch.ones(4, dtype=torch.float64)

LAW = {
    "hooks on rows": hooked,
    "hooks on what every rank has": hooked_constant,
    "a function of one's own, of each row": lambda x, src: Square.apply(x)[src] + 1,
    "a function of one's own, over rows": lambda x: Centred.apply(x) * 2,
    "a function of one's own, on sums": lambda x, src, dst, e: sums(Centred.apply(sums(x, src, dst, e)), src, dst, e),
    "a function of one's own as the result": lambda x: Centred.apply(x),
    "a layer that changes its argument": (lambda x, src, dst, e, net: net(sums(x, src, dst, e), src), {"net": Caller}),
    "a layer that changes a fresh argument": (lambda x, src, net: net(x * 1, src), {"net": Caller}),
    "ids used again": (lambda x, net: net(x), {"net": Reused, "calls": 2}),
    "private attributes": (lambda x, net: net(x), {"net": Private}),
    "gradients within, as the result": lambda x: torch.autograd.grad((x**2).sum(), x)[0],
    "backward within": lambda x: (x.detach() * 1).requires_grad_().sum() * 0 + x.sum(),
    "inference": (
        lambda x, src, dst, e: torch.inference_mode()(lambda: sums(x, src, dst, e)[src] * 2)(),
        {"gradients": False},
    ),
}
for reentrant in (False, True):
    way = "the old way" if reentrant else "computed again"
    LAW |= {
        f"a cached exchange {way}": cached(reentrant),
        f"sums {way}": again(sums, reentrant),
        f"rows of two lengths {way}": of_two_lengths(reentrant),
        f"masked rows {way}": masked_again(reentrant),
        f"dropout {way}": (noisy(reentrant), {"against": "alone"}),
        f"random numbers {way}": (noisy_uniform(reentrant), {"against": "alone"}),
        f"a layer {way}": (layer_again(reentrant), {"net": lambda: nn.Linear(4, 4)}),
    }
FIRST = {
    "ends": lambda x, h, src, mask: h[src],
    "rows of two lengths": lambda x, h, src, mask: x * h,
    "a sum": lambda x, h, src, mask: x.sum(0),
    "a mean": lambda x, h, src, mask: x - x.mean(0),
    "a mask": lambda x, h, src, mask: x[mask],
}
LAW |= {f"{name} without gradient first": without_gradient_first(function) for name, function in FIRST.items()}
WAITING = {}


@cases(EXACT)
def test_what_modules_keep_and_return_is_exact(function, more):
    check(function, **more)


@cases(ALONE)
def test_equal_calls_of_chance_are_two_draws(function, more):
    check(function, against="alone", **more)


COMPILES_FIRST = """
import sys, torch
from domainpar import World, parallelize, split_graph

class Network(torch.nn.Module):
    def forward(self, x, edge_index):
        assert "torch._dynamo" not in sys.modules
        added = torch.compile(lambda x: x.new_zeros(x.shape).index_add(0, edge_index[1], x[edge_index[0]]))
        return added(x) - x.mean(0)

with World.session() as world:
    edge_index, x = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), torch.arange(6.0).view(3, 2)
    part = split_graph(edge_index, num_nodes=3, world=world)
    said = parallelize(Network(), world)(part.nodes(x), part.edge_index)
assert torch.equal(said, torch.tensor([[4.0, 5], [4, 6], [2, 3]]) - x.mean(0)), said
"""


@pytest.mark.slow
def test_the_first_function_that_is_compiled_in_a_process_runs_as_written():
    """In a process of its own: here somebody has compiled something."""
    code, text = run_command([sys.executable, "-c", COMPILES_FIRST], 60)
    assert code == 0, text


def test_that_a_model_is_not_compiled_is_said_once(monkeypatch):
    monkeypatch.setattr(transforms, "_said", set())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            check(lambda x: checkpoint(compiled_relu, x * 1, x, use_reentrant=False))
    assert [str(one.message).split()[0] for one in warned] == ["torch.compile"]


def what_torch_holds():
    """Everything in the places of torch where a function is transformed."""
    owners = (torch, checkpointing, torch.jit.ScriptFunction, checkpointing.CheckpointFunction, eval_frame)
    return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]


@pytest.mark.parametrize("refused", [None, "torch.sort runs along the nodes"])
def test_after_a_pass_torch_holds_what_it_held_before(refused):
    before, inside = what_torch_holds(), []

    def run(x, src):
        inside.extend([what_torch_holds()] if watching() else [])
        made = checkpoint(compiled_relu, scripted_centre_(x * 1), x, use_reentrant=False)
        return made if refused is None else made.sort(0).values

    check(run, refused=refused)  # ranks are threads, whose passes overlap
    assert inside
    assert before not in inside
    assert what_torch_holds() == before


def test_outside_a_watch_functions_are_transformed_as_ever():
    check(lambda x: scripted_centre_(x * 1))
    seen = []
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: (seen.append(1), x**2)[1], x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert "prim" in str(scripted_centre_.graph)


def test_a_scripted_module_is_refused_before_anything_runs():
    with pytest.raises(NotExact, match=r"1: a module of torch.jit.script.*PYTORCH_JIT=0"):
        parallelize(nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 4))), World.alone())


@refusals(REFUSED)
def test_what_the_watch_cannot_see_is_refused(function, text, more):
    check(function, refused=text, **more)


@cases(LAW, WAITING)
def test_what_goes_past_the_rules_is_exact_or_refused(function, more):
    check(function, or_refused=True, **more)


def test_names_tell_in_place_calls_and_reflected_ones():
    assert name_of(torch.Tensor.add_) == ("add", True)
    assert name_of(torch.Tensor.__iadd__) == ("add", True)
    assert name_of(torch.Tensor.__add__)[1] is False
    assert name_of(torch.Tensor.__bool__) == ("python bool", False)
    assert name_of(torch.Tensor.bool) == ("bool", False)
    assert name_of(torch.Tensor.__rand__)[0] != name_of(torch.rand)[0]
    assert name_of(torch.Tensor.data.__set__)[0] == "set data"
    assert name_of(torch.Tensor.__setitem__) == ("setitem", True)


def test_a_call_has_one_rule():
    with pytest.raises(AssertionError):
        rule("add")(RULES["add"])


def test_refusals_name_the_module_on_every_rank():
    net = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict())
    net[1].forward = lambda x: x.cumsum(0)
    failures = trial_of(lambda x, net: net(x), net=net.double()).split(4).failures
    assert [failure.refuses for failure in failures] == [True] * 4
    for failure in failures:
        assert str(failure.error).startswith("net"), failure.error
        assert "torch.cumsum" in str(failure.error)


def test_one_rank_alone_exchanges_nothing():
    trial = trial_of(lambda x, src, dst, e: (sums(sums(x, src, dst, e), src, dst, e), x.sum(0)))
    (rank,) = trial.split(1).ranks
    assert (rank.exchanges, rank.sums) == (0, 0)
