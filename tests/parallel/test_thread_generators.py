"""Ranks that are threads draw random numbers as processes do: each from a generator of its own."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from domainpar.placed.split import split_graph
from domainpar.testing import patient, run_ranks

X = torch.arange(1.0, 25.0).view(4, 6)
SCRIPTED = torch.jit.script(nn.Dropout(0.5))


def in_inference_mode():
    with torch.inference_mode():
        return F.dropout(X, 0.5), torch.rand(3)


DRAWS = {
    "rand": lambda: (torch.rand(3), torch.rand(2, dtype=torch.float64), torch.randn(2, 2), torch.randint(100, (4,))),
    "low": lambda: (torch.randint(50, 100, (4,)), torch.randperm(9), torch.normal(0.0, 1.0, (3,))),
    "like": lambda: (torch.rand_like(X), torch.randn_like(X), torch.randint_like(X, 9), torch.randint_like(X, 3, 9)),
    "in place": lambda: (X.clone().uniform_(2, 3), X.clone().normal_(), X.clone().random_(7), X.clone().exponential_()),
    "by each": lambda: (torch.bernoulli(X / 25), torch.poisson(X), torch.multinomial(X, 2), torch.normal(X, 2.0)),
    "gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "binomial": lambda: torch.distributions.Binomial(9, X / 25).sample(),
    "dropout": lambda: (F.dropout(X, 0.5), F.dropout1d(X, 0.5), F.alpha_dropout(X, 0.5)),
    "native dropout": lambda: torch.native_dropout(X, 0.3, True),
    "no dropout": lambda: (F.dropout(X, 0.5, False), torch.native_dropout(X, 0.5, False), torch.rand(2)),
    "rrelu": lambda: (F.rrelu(-X, training=True), F.rrelu(-X, training=False), torch.rand(2)),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "lstm": lambda: nn.LSTM(6, 5, 2, dropout=0.5)(X)[0].detach(),
    "module": lambda: list(nn.TransformerEncoderLayer(6, 2, 8).state_dict().values()),
    "scripted": lambda: SCRIPTED(X),
    "vmap": lambda: torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(X),
    "inference": in_inference_mode,
    "seeds": lambda: (torch.tensor(torch.initial_seed()), torch.manual_seed(5) and torch.get_rng_state()),
}


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in value for tensor in flat(item)]


@pytest.mark.parametrize("name", DRAWS)
def test_every_rank_draws_what_one_rank_alone_draws(name):
    def work(world):
        drawn = []
        for _ in range(3):
            drawn += flat(DRAWS[name]())
            world.transport.barrier()  # others draw in between
        return [*drawn, torch.rand(1)]

    torch.manual_seed(7)
    ranks = run_ranks(work, 3)
    expected = [tensor for _ in range(3) for tensor in flat(DRAWS[name]())] + [torch.rand(1)]
    for drawn in ranks:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn, expected, strict=True))


def test_a_seed_is_of_the_rank_that_sets_it_and_others_notice_nothing():
    def work(world):
        torch.manual_seed(world.rank)
        world.transport.barrier()
        first = torch.rand(2)
        world.transport.barrier()
        return first, torch.initial_seed()

    before = torch.get_rng_state()
    for rank, (drawn, seed) in enumerate(run_ranks(work, 3)):
        assert seed == rank
        assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(rank)))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_that_wait_for_each_other_by_other_means_keep_their_generators():
    everyone = threading.Barrier(3)

    def work(world):
        torch.manual_seed(world.rank)
        with world.transport.elsewhere():
            everyone.wait(10)
        return torch.rand(2)

    for rank, drawn in enumerate(run_ranks(work, 3)):
        assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(rank)))


def test_a_generator_that_is_given_is_used():
    def work(world):
        generator = torch.Generator().manual_seed(3)
        return torch.rand(2, generator=generator), X.clone().normal_(generator=generator)

    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(2, generator=generator), X.clone().normal_(generator=generator)
    assert all(torch.equal(*pair) for drawn in run_ranks(work, 2) for pair in zip(drawn, expected))


def test_checkpoint_drops_the_same_again_on_ranks_at_the_same_time():
    def work(world):
        x = torch.ones(1000, requires_grad=True)
        for _ in range(20):
            out = checkpoint(lambda x: F.dropout(x, 0.5) ** 2, x, use_reentrant=False)
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(grad, 2 * out.detach())
        return out.detach()

    first, second = run_ranks(work, 2)
    assert torch.equal(first, second)


def test_ranks_inside_of_ranks_begin_where_these_are():
    def inner(world):
        return torch.rand(1)

    def outer(world):
        torch.manual_seed(world.rank)
        inside = run_ranks(inner, 2)
        return [*inside, torch.rand(1)]

    for drawn in run_ranks(outer, 2):
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(drawn[1], drawn[2])


def test_all_is_put_back_after_an_error():
    def work(world):
        torch.rand(world.rank)
        world.transport.barrier()
        torch.rand(1)
        raise KeyError

    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        run_ranks(work, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_a_graph_that_is_split_is_that_of_one_rank_and_leaves_generators_alike():
    ends = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])

    def work(world):
        part = split_graph(ends, 4, world, partitioner=torch.arange(4).numpy() % world.size)
        layer = nn.Linear(6, 6)  # drawn by each rank, the same
        out = F.dropout(layer(part.nodes(X)), 0.5)
        return part.whole(out).detach(), torch.rand(1)

    torch.manual_seed(0)
    ((one, after),) = run_ranks(work, 1)
    assert 0 < int((one == 0).sum()) < one.numel()
    for out, rand in run_ranks(work, 3):
        torch.testing.assert_close(out, one)
        assert torch.equal((out == 0), (one == 0))
        assert torch.equal(rand, after)


def test_other_devices_are_left_alone():
    def work(world):
        return torch.rand(2, device="meta").shape, torch.empty(3, device="meta").normal_().shape

    assert run_ranks(work, 2) == [((2,), (3,))] * 2


COMPILED = """
import sys
import torch
from domainpar.testing import run_ranks

seen = []

def backend(graph, inputs):
    seen.append(graph)
    return graph.forward

def work(world):
    torch.rand(2)
    if world.rank == 0:
        assert "torch._dynamo" not in sys.modules
    world.transport.barrier()
    if world.rank:
        return
    compiled = torch.compile(lambda x: torch.nn.functional.dropout(x.sin(), 0.5).cos(), backend=backend, fullgraph=True)
    state = torch.get_rng_state()
    first = compiled(torch.ones(50))
    torch.set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(50).sin(), 0.5).cos())

run_ranks(work, 2)
assert len(seen) == 1
"""


def test_torchs_compiler_is_loaded_only_where_a_rank_compiles_and_then_compiles(tmp_path):
    (tmp_path / "program.py").write_text(COMPILED)
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=patient(120)
    )
    assert ended.returncode == 0, ended.stderr
