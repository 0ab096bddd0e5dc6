"""Operators of torch.library with a rule of one line: by rows, read and summed at indices, and their backward."""

import numpy as np
import pytest
import torch
from marks import slow
from torch import Tensor, nn
from whole_and_split import ODD, USUAL, cases, check, refusals

import domainpar
from domainpar import split_graph, verify
from domainpar.testing import run_ranks

OPS = torch.ops.tests_of_domainpar


def operator(name, signature, fake=None):
    """Register a function as an operator of torch with a rule; it notes how many rows it is given."""

    def register(function):
        made = torch.library.custom_op(f"tests_of_domainpar::{name}", function, mutates_args=())
        domainpar.rule(made, signature)
        return made

    return register


@operator("gate", "e e . -> e")
def gate(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return x * torch.sigmoid(y @ weight)


@operator("gate_backward", "e e e . -> e e +")
def gate_backward(grad: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    open_ = torch.sigmoid(y @ weight)
    inner = grad * x * open_ * (1 - open_)
    return grad * open_, inner @ weight.t(), y.t() @ inner


gate.register_autograd(
    lambda ctx, grad: OPS.gate_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@operator("messages", "n e e>n e>m m -> +m")
def messages(x: Tensor, e: Tensor, src: Tensor, dst: Tensor, count: int) -> Tensor:
    """Products of nodes and edges, summed where edges end: nothing of the length of the edges is kept."""
    return x.new_zeros(count, x.size(1)).index_add_(0, dst, x[src] * e)


@operator("messages_backward", "m n e e>n e>m -> +n e")
def messages_backward(grad: Tensor, x: Tensor, e: Tensor, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x).index_add_(0, src, grad[dst] * e), grad[dst] * x[src]


def keep_messages(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])


messages.register_autograd(
    lambda ctx, grad: (*OPS.messages_backward(grad, *ctx.saved_tensors), None, None, None), setup_context=keep_messages
)


@operator("pooled", "n n>g g -> +g")
def pooled(x: Tensor, batch: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, x.size(1)).index_add_(0, batch, x)


@operator("at_both", "n e>n e>n -> +n")
def at_both(x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add_(0, dst, x[src]).index_add_(0, src, 2 * x[dst])


@operator("some", "n . . n -> n")
def some(them: list[Tensor], by: float, bias: Tensor | None, count: int) -> Tensor:
    assert all(len(x) == count for x in them)
    return sum(them[1:], them[0]) * by + (0 if bias is None else bias)


@operator("wrong", "n -> n")
def wrong(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True).expand_as(x).clone()


@operator("one_less", "n -> n")
def one_less(x: Tensor) -> Tensor:
    return x[1:].clone()


weight_of = lambda x: torch.linspace(-1, 1, 16, dtype=x.dtype).view(4, 4)  # noqa: E731
EXACT = {
    "row by row": lambda x, u: OPS.gate(x, x * u[:, None], weight_of(x)),
    "row by row, of edges": lambda x, e, src: OPS.gate(e, x[src], weight_of(x)),
    "without rows": lambda c, x: OPS.gate(c[None], c[None] + 1, weight_of(x)) + x,
    "a weight that learns": lambda x, table: OPS.gate(x, x, torch.cat([table, table[:1]])),
    "summed where edges end": lambda x, e, src, dst: OPS.messages(x, e, src, dst, x.size(0)),
    "summed where edges begin": lambda x, e, src, dst: OPS.messages(x, e, dst, src, x.size(0)),
    "of nodes that a plain index names": (
        lambda x, e, dst: OPS.messages(x, e, torch.arange(len(e)) % len(x), dst, x.size(0)), {}),
    "of what every rank holds, at nodes": lambda table, e, kind, dst, x: OPS.messages(table, e, kind, dst, len(x)),
    "of nodes, at what every rank holds": lambda x, e, src, kind: OPS.messages(x, e, src, kind, 3),
    "twice, one after the other": lambda x, e, src, dst: OPS.messages(
        OPS.messages(x, e, src, dst, x.size(0)).tanh(), e, src, dst, x.size(0)),
    "at graphs": lambda x, batch: OPS.pooled(x.detach(), batch, 3) + x.sum(),
    "at both ends": lambda x, src, dst: OPS.at_both(x.detach(), src, dst) + x,
    "at ends that were turned round": lambda x, src, dst: OPS.at_both(x.detach(), dst.flip(0), src.flip(0)) + x,
    "a list, a number, nothing": lambda x, z: (OPS.some([x.detach(), z.detach()], 0.5, None, len(x)) + x,
                                               OPS.some(them=[x.detach()], by=2.0, bias=None, count=len(x)) + x),
}  # fmt: skip


@cases(EXACT)
def test_an_operator_with_a_rule_is_exact(function, more):
    check(function, **more)


@pytest.mark.parametrize("name", [name for name in ODD if name != "as many edges as nodes"])
def test_it_is_exact_on_odd_graphs(name):
    check(EXACT["twice, one after the other"], ODD[name])
    check(EXACT["summed where edges begin"], ODD[name])


def learnt(world):
    """What two rounds of messages give on some ranks, the last of which owns nothing, and their gradients; whole."""
    owner = np.array(USUAL.assignment) % max(1, world.size - 1)
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world, partitioner=owner)
    x, e = (leaf.clone().requires_grad_() for leaf in (USUAL.x, USUAL.e))
    at, (src, dst) = part.nodes(x), part.edge_index
    for _ in range(2):
        at = OPS.gate(OPS.messages(at, part.edges(e), src, dst, USUAL.num_nodes), at, weight_of(at))
    (at.square().sum() + part.nodes(x).sum()).backward()
    return part.whole(at.detach()), x.grad, e.grad


@pytest.mark.parametrize(("size", "transport"), [(2, "threads"), (4, "threads"), slow(3, "gloo")])
def test_any_number_of_ranks_gives_the_same(size, transport):
    (alone,) = run_ranks(learnt, 1)
    for found in run_ranks(learnt, size, transport=transport):
        for ours, theirs in zip(found, alone, strict=True):
            assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


REFUSED = {
    "rows where the rule has none": (lambda x: OPS.gate(x[:4], x[:4], x[:4]), "where its rule has no rows"),
    "rows along another dimension": (lambda x: OPS.gate(x.t(), x.t(), x), "its rule has rows e along dimension 0"),
    "no rule": (lambda x: OPS.without_rule(x.detach()) + x, "tests_of_domainpar::without_rule of rows of"),
    "an index that every rank holds, into rows": (
        lambda x, c: OPS.messages(x, c.new_ones(3, 4), torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 2),
        "with an index that every rank holds"),
}  # fmt: skip
torch.library.custom_op(
    "tests_of_domainpar::without_rule", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
)


@refusals(REFUSED)
def test_what_a_rule_does_not_say_is_refused(function, text, more):
    check(function, refused=text, **more)


def test_an_operator_gets_this_ranks_rows_only():
    seen = []
    probe = torch.library.custom_op(
        "tests_of_domainpar::probe", lambda x, src: (seen.append((len(x), len(src))), x[src].clone())[1],
        mutates_args=(), schema="(Tensor x, Tensor src) -> Tensor")  # fmt: skip
    read = lambda x, src: OPS.probe(x.detach(), src) + x.sum()  # noqa: E731
    check(read, refused="tests_of_domainpar::probe of rows of")
    domainpar.rule(probe, "n e>n -> e")
    seen.clear()
    check(read, ranks=(4,))
    on_ranks = [one for one in seen if one != (USUAL.num_nodes, USUAL.edge_index.size(1))]
    assert len(on_ranks) == 4
    assert sum(edges for _, edges in on_ranks) == USUAL.edge_index.size(1)
    assert (0, 0) in on_ranks


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.lin = function, nn.Linear(4, 4)

    def forward(self, x, edge_index):
        return self.function(self.lin(x), *edge_index)


GRAPH = USUAL.edge_index, USUAL.num_nodes


def verified(function):
    return verify(Calls(function), GRAPH, inputs=lambda part: (part.nodes(USUAL.x), part.edge_index))


def test_verify_passes_a_rule_that_is_right_and_finds_one_that_is_not():
    right = verified(
        lambda x, src, dst: OPS.messages(x, x.new_ones(1, 4).expand(len(src), 4) + src[:, None], src, dst, len(x))
    )
    assert right.exact, right
    found = verified(lambda x, src, dst: x + OPS.wrong(x.detach()))
    assert not found.exact
    assert found.first_difference is not None


def test_a_result_with_another_number_of_rows_than_the_rule_says_fails():
    assert " rows 'n' of this rank" in verified(lambda x, src, dst: x.sum() + OPS.one_less(x.detach())).failed or ""


@pytest.mark.parametrize(("signature", "text"), [
    ("n e e>n e>m m", "is no signature"), ("n e e> e>m m -> +m", "is no signature"),
    ("N e . . . -> .", "is no signature"),
    ("n e e>n e>m -> +m", "has 4 arguments and 1 results, and tests_of_domainpar::messages has 5 and 1"),
    ("n e e>n e>m m -> +m .", "has 5 arguments and 2 results"),
])  # fmt: skip
def test_a_signature_that_does_not_fit_is_refused(signature, text):
    with pytest.raises(ValueError, match=text.replace("+", r"\+")):
        domainpar.rule(OPS.messages, signature)


def test_operators_of_torch_and_operators_that_write_take_no_rule():
    with pytest.raises(ValueError, match="aten::add is torch's own"):
        domainpar.rule(torch.ops.aten.add.Tensor, "n n . -> n")
    writes = torch.library.custom_op("tests_of_domainpar::writes", lambda x: x.add_(1) and None, mutates_args=("x",),
                                     schema="(Tensor(a!) x) -> ()")  # fmt: skip
    with pytest.raises(ValueError, match="writes into its arguments"):
        domainpar.rule(writes, "n ->")
