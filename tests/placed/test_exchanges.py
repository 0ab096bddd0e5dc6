"""What placed tensors send: the rows of `AdjointHalo` and no other, once, and control messages to neighbours."""

import pytest
import torch
from marks import slow

from domainpar import AdjointHalo, split_graph
from domainpar.placed.tensor import settle
from domainpar.testing import run_ranks

N = 30
DRAW = torch.Generator().manual_seed(0)
EDGES = torch.randint(N, (2, 80), generator=DRAW)
X = torch.randn(N, 3, generator=DRAW, dtype=torch.float64)
WEIGHTS = torch.randn(80, 3, generator=DRAW, dtype=torch.float64)


def noted(transport):
    """Notes what a transport sends from now on: (rows, peers) of each exchange."""
    sent, start = [], transport.start

    def noting(send, send_counts, receive, receive_counts):
        sent.append((send.clone(), list(send_counts)))
        return start(send, send_counts, receive, receive_counts)

    transport.start = noting
    return sent


def on_rank(world):
    owner = (torch.arange(N) * 7 // 3 % max(1, world.size - 1)).numpy()  # the last rank owns nothing
    part = split_graph(EDGES, N, world, partitioner=owner)
    x, weights = part.nodes(X).requires_grad_(), part.edges(WEIGHTS)
    sent = noted(world.transport)
    (x[part.edge_index[0]] * weights).sum().backward()
    gradient = settle(x.grad).local  # until somebody looks, ghost rows keep what they have for their owners
    of_placed = list(sent)
    sent.clear()
    halo = AdjointHalo(part.plan, world.transport)
    sent.clear()
    owned = X[torch.from_numpy(part.plan.owned_ids)].requires_grad_()
    mine = WEIGHTS[torch.from_numpy(part.plan.edge_ids)]
    (halo.extend(owned)[torch.from_numpy(part.plan.edge_rows[0])] * mine).sum().backward()
    torch.testing.assert_close(gradient, owned.grad, rtol=1e-14, atol=1e-14)
    assert len(of_placed) == len(sent)
    for (rows, counts), (theirs, their_counts) in zip(of_placed, sent, strict=True):
        assert counts == their_counts
        torch.testing.assert_close(rows, theirs, rtol=1e-14, atol=1e-14)
    return len(sent)


@pytest.mark.parametrize("transport", ["threads", slow("gloo")])
def test_placed_tensors_exchange_exactly_the_rows_of_adjoint_halo_forward_and_backward(transport):
    size = 4 if transport == "threads" else 3
    assert run_ranks(on_rank, size, transport=transport, timeout=60) == [2] * size


def control_bytes(world):
    """Bytes of control messages of a split of a ring of parts: each has two neighbours."""
    n = 10 * world.size
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    sizes, gather = [], world.transport.all_gather
    world.transport.all_gather = lambda payload: (sizes.append(len(payload)), gather(payload))[1]
    split_graph(ring, n, world, partitioner=(torch.arange(n) // 10).numpy())
    return max(sizes)


def test_no_rank_sends_a_number_for_each_pair_of_ranks():
    """At 8 ranks and at 64 a rank says as much: words of agreement, and what it has for two neighbours."""
    few, many = (max(run_ranks(control_bytes, size, timeout=60)) for size in (8, 64))
    assert many <= few + 64  # names of ranks have a digit more
