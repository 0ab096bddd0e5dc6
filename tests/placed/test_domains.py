"""Parts of a host that owns its domains: any program gives what it gives on the whole graph, in the host's order.

The host of these tests has odd names of nodes, rows in an odd order, ghosts that no edge needs, several ghosts of one
node, and ghosts of its own nodes. It moves rows itself, and domainpar has no part in that.
"""

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from marks import slow
from proving import check_no_rank_holds_all
from torch import nn
from torch_geometric.nn import GATConv, GCNConv
from whole_and_split import NUM_RANKS, USUAL, gap

from domainpar import NotExact, World, parallelize, part_of_domain
from domainpar.common.agreement import Refused
from domainpar.testing import find_mpiexec, run_ranks

FLOATS = torch.float64
needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")


class Shared:
    """What the threads of the host see of each other."""

    def __init__(self, num_ranks):
        self.met = threading.Barrier(num_ranks)
        self.tables = [None] * num_ranks

    def swap(self, rank, *mine):
        """What all have."""
        self.tables[rank] = tuple(one.clone() for one in mine)
        self.met.wait(60)
        found = list(self.tables)
        self.met.wait(60)  # nobody may go on before all have read
        return found


class Processes:
    """The same of processes, by plain mpi4py or torch."""

    def __init__(self, transport):
        self.transport = transport

    def swap(self, rank, *mine):
        if self.transport == "mpi":
            return MPI().COMM_WORLD.allgather(mine)
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def world(self):
        return World.from_mpi(MPI().COMM_WORLD) if self.transport == "mpi" else World.from_process_group()


def MPI():  # loaded in processes of MPI only
    from mpi4py import MPI

    return MPI


@dataclass
class Host:
    """One domain.

    Attributes:
        owned, ghosts: The node of each local row, by its number in the sample.
        edges, edge_rows: Its edges, by their number in the sample, and the local rows of their ends.
    """

    owned: torch.Tensor
    ghosts: torch.Tensor
    edges: torch.Tensor
    edge_rows: torch.Tensor
    rank: int
    shared: Shared | Processes
    calls: int = 0

    @staticmethod
    def name(nodes):
        return 1000 - 7 * nodes

    def forward(self, table):
        self.calls += 1
        values = {}
        for nodes, theirs in self.shared.swap(self.rank, self.owned, table[: len(self.owned)]):
            values |= dict(zip(nodes.tolist(), theirs))
        for row, node in enumerate(self.ghosts.tolist(), len(self.owned)):
            table[row] = values[node]

    def reverse(self, table):
        self.calls += 1
        row_of = {node: row for row, node in enumerate(self.owned.tolist())}
        for nodes, theirs in self.shared.swap(self.rank, self.ghosts, table[len(self.owned) :]):
            for node, share in zip(nodes.tolist(), theirs):
                if node in row_of:
                    table[row_of[node]] += share

    def part(self, world, by_host):
        exchange = (self.forward, self.reverse) if by_host else None
        return part_of_domain(self.edge_rows, self.name(self.owned), self.name(self.ghosts), world, exchange=exchange)


def host_of(rank, size, shared, sample=USUAL):
    owner = torch.tensor(sample.assignment) % size
    nodes = torch.arange(sample.num_nodes)
    order = nodes[torch.sin(7.0 * nodes).argsort()]
    owned = order[owner[order] == rank]
    edges = (owner[sample.edge_index[1]] == rank).nonzero().view(-1).flip(0)
    src, dst = sample.edge_index[:, edges]
    # Two ghosts of each node that an edge needs, own ones among them, and one of a node that none needs.
    needed = src.unique().flip(0) if len(owned) else src
    ghosts = torch.cat([needed, order[:1] if len(owned) else order[:0], needed])
    rows = []
    for number, (begin, end) in enumerate(zip(src.tolist(), dst.tolist())):
        places = len(owned) + (ghosts == begin).nonzero().view(-1)
        if number % 3 == 0 and owner[begin] == rank:
            places = (owned == begin).nonzero().view(-1)
        rows.append([int(places[number % len(places)]), int((owned == end).nonzero())])
    return Host(owned, ghosts, edges, torch.tensor(rows, dtype=torch.int64).view(-1, 2).T, rank, shared)


class BothEnds(nn.Module):
    """Sums and softmax at the nodes where edges end, sums and largest values where they begin."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = GCNConv(4, 6), GATConv(6, 3, edge_dim=4), nn.BatchNorm1d(6)

    def forward(self, x, edge_index, e):
        src, dst = edge_index
        x = self.norm(self.first(x, edge_index)).tanh()
        sent = x[dst] * e[:, :1]
        back = torch.zeros_like(x).index_add(0, src, sent)
        most = torch.zeros_like(x).index_reduce(0, src, sent, "amax", include_self=False)
        return self.second(x + back + most, edge_index, e), sent


class Forces(nn.Module):
    """Energy and forces that a loss can learn from: gradients of gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, edge_index, e):
        x = x if x.requires_grad else x.detach().requires_grad_()
        src, dst = edge_index
        energy = (self.linear(x[src] - x[dst] + e).tanh() * x[src]).sum()
        (force,) = torch.autograd.grad(-energy, x, create_graph=True)
        return force, (force[src] * e).sum(1) + 0.0 * energy


def made(kind):
    torch.manual_seed(2)
    return kind().double()


def learned(outputs, leaves, module):
    """A loss of all numbers and its gradients."""
    nodes, edges = outputs
    loss = nodes.sin().sum() + (edges**2).mean() * 3
    loss.backward()
    return loss, [leaf.grad for leaf in leaves], [parameter.grad for parameter in module.parameters()]


def on_whole(kind):
    module = made(kind)
    leaves = [one.clone().requires_grad_() for one in (USUAL.x, USUAL.e)]
    outputs = module(leaves[0], USUAL.edge_index, leaves[1])
    return outputs, *learned(outputs, leaves, module)


def in_domain(world, shared, modules, by_host, dtype=FLOATS):
    host = host_of(world.rank, world.size, shared)
    part, module = host.part(world, by_host), parallelize(modules[world.rank].to(dtype), world)
    leaves = [USUAL.x[host.owned].to(dtype).requires_grad_(), USUAL.e[host.edges].to(dtype).requires_grad_()]
    tried = host.calls
    outputs = module(part.nodes(leaves[0]), part.edge_index, part.edges(leaves[1]))
    loss, gradients, of_weights = learned(outputs, leaves, module)
    own = [part.to_local(one).detach() for one in outputs]
    assert not any(type(one) is not torch.Tensor for one in own)
    return host, own, loss.item(), gradients, of_weights, host.calls - tried


def off(found, kind):
    """The largest relative difference of what all ranks have from the whole."""
    outputs, loss, gradients, of_weights = on_whole(kind)
    gaps = [gap(torch.tensor(one[2], dtype=FLOATS), loss.detach()) for one in found]
    for number, wanted in enumerate(outputs):
        rows = [(host.owned, host.edges)[number] for host, *_ in found]
        assert torch.cat(rows).sort().values.tolist() == list(range(len(wanted)))
        whole, grad = torch.zeros_like(wanted), torch.zeros_like(gradients[number])
        for at, (_, own, _, grads, *_) in zip(rows, found):
            whole[at], grad[at] = own[number].to(FLOATS), grads[number].to(FLOATS)
        gaps += [gap(whole, wanted.detach()), gap(grad, gradients[number])]
    largest = max(float(grad.abs().max()) for grad in of_weights)  # a bias before a norm has none but of rounding
    for _, _, _, _, grads, _ in found:
        gaps += [gap(mine.to(FLOATS), theirs, largest) for mine, theirs in zip(grads, of_weights)]
    return max(gaps)


@pytest.mark.parametrize("num_ranks", [1, 2, slow(3), NUM_RANKS])
@pytest.mark.parametrize("by_host", [False, True], ids=["over the world", "by the host"])
@pytest.mark.parametrize("kind", [BothEnds, Forces])
def test_a_module_in_domains_of_a_host_gives_what_it_gives_on_the_whole_graph(kind, by_host, num_ranks):
    if num_ranks == NUM_RANKS:
        check_no_rank_holds_all(USUAL.edge_index, USUAL.assignment, NUM_RANKS, "incoming")
    shared, modules = Shared(num_ranks), [made(kind) for _ in range(num_ranks)]
    found = run_ranks(in_domain, num_ranks, shared, modules, by_host)
    assert off(found, kind) < 1e-12
    assert all((one[-1] > 1) == (by_host and num_ranks > 1) for one in found), "who moved the rows?"


def in_processes(world, transport):
    processes = Processes(transport)
    own = processes.world()
    found = {}
    for kind in (BothEnds, Forces):
        for by_host in (False, True):
            found[kind.__name__, by_host] = in_domain(own, processes, [made(kind)] * own.size, by_host)
    own.close()
    return found


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow])])
def test_so_it_does_in_processes_of_a_host_with_its_own_communicator(transport):
    found = run_ranks(in_processes, 4, transport, transport=transport)
    for kind in (BothEnds, Forces):
        for by_host in (False, True):
            of_ranks = [one[kind.__name__, by_host] for one in found]
            assert off(of_ranks, kind) < 1e-12
            assert all((one[-1] > 1) == by_host for one in of_ranks)


def test_rows_of_float32_travel_by_the_host_too():
    found = run_ranks(in_domain, 3, Shared(3), [made(Forces) for _ in range(3)], True, torch.float32)
    assert 1e-12 < off(found, Forces) < 1e-5
    assert all(calls > 1 for *_, calls in found)


def given_of(rank, size=3, shared=None):
    host = host_of(rank, size, shared)
    return {"edge_index": host.edge_rows, "owned_ids": host.name(host.owned), "ghost_ids": host.name(host.ghosts)}


@pytest.mark.parametrize("by_host", [False, True], ids=["over the world", "by the host"])
def test_integers_masks_and_rows_that_are_no_ghosts_travel_over_the_world(by_host):
    shared = Shared(3)

    def work(world):
        host = host_of(world.rank, 3, shared)
        part = host.part(world, by_host)
        tried = host.calls
        kind, mask = part.nodes(host.owned), part.nodes(USUAL.mask[host.owned])
        far = part.nodes(USUAL.series[:, host.owned], 1)[:, part.whole(kind).sort().indices]
        wide = part.nodes(USUAL.x[host.owned].to(torch.bfloat16))
        src = part.edge_index[0]
        read, chosen = [part.to_local(one[src]) for one in (kind, mask, wide)], part.to_local(kind[mask])
        assert host.calls == tried
        return host.owned, host.edges, read, far, chosen

    for owned, edges, (kind, mask, wide), far, chosen in run_ranks(work, 3):
        src = USUAL.edge_index[0][edges]
        assert torch.equal(kind, src)
        assert torch.equal(mask, USUAL.mask[src])
        assert torch.equal(wide, USUAL.x[src].to(torch.bfloat16))
        assert torch.equal(far.local, USUAL.series)
        assert torch.equal(chosen, owned[USUAL.mask[owned]])


def test_rows_of_the_whole_graph_are_those_of_the_ranks_one_after_the_other():
    hosts = [host_of(rank, 3, None) for rank in range(3)]

    def work(world):
        host = hosts[world.rank]
        part = host.part(world, False)
        x, e = part.nodes(USUAL.x[host.owned]), part.edges(USUAL.columns[:, host.edges], 1)
        return part.whole(x), part.whole(e), part.to_local(x.sum(0)), part.to_local(e), x.local.data_ptr()

    nodes, edges = (torch.cat([getattr(host, name) for host in hosts]) for name in ("owned", "edges"))
    for host, (x, e, sums, own, _) in zip(hosts, run_ranks(work, 3)):
        assert torch.equal(x, USUAL.x[nodes])
        assert torch.equal(e, USUAL.columns[:, edges])
        assert torch.equal(own, USUAL.columns[:, host.edges])
        torch.testing.assert_close(sums, USUAL.x.sum(0))


def test_writes_into_rows_and_into_tensors_of_the_host_leave_the_others_alone():
    def work(world):
        part = part_of_domain(**given_of(0, 1), world=world)
        mine = torch.ones(13, dtype=FLOATS)
        x = part.nodes(mine)
        x += 1.0
        part.to_local(x).zero_()
        before, y = mine.sum().item(), part.nodes(mine)
        mine.zero_()
        return before, x.sum().item(), y.sum().item()

    assert run_ranks(work, 1) == [(13.0, 26.0, 13.0)]


def changed(**how):
    return lambda given: given | {name: change(given[name]) for name, change in how.items()}


REFUSED = {
    "a ghost that nobody owns": (
        changed(ghost_ids=lambda ids: torch.cat([ids[:1], ids[1:] * 0 + 3])),
        r"local row \d+ is a ghost of node 3, which no rank owns; so are \d+ of \d+ ghosts",
    ),
    "a node of two ranks": (
        changed(owned_ids=lambda ids: torch.cat([given_of(0)["owned_ids"][:1], ids[1:]])),
        r"node \d+ is owned by ranks 0, 1",
    ),
    "a node twice": (changed(owned_ids=lambda ids: ids[[0, 0, *range(2, len(ids))]]), "is owned twice by rank 1"),
    "an edge that ends at a ghost": (
        changed(edge_index=lambda rows: rows.flip(0)),
        r"edge \d+ ends at local row \d+, a ghost: this rank owns the first \d+",
    ),
    "an edge of no row": (changed(edge_index=lambda rows: rows + 40), r"edge 0 joins nodes \d+ and \d+"),
    "ids of floats": (changed(owned_ids=lambda ids: ids / 2), r"the owned_ids .* pass integers"),
    "ids in a table": (changed(ghost_ids=lambda ids: ids[:, None]), r"the ghost_ids .* have shape \(\d+, 1\)"),
    "one function": (lambda given: given | {"exchange": (print,)}, "is to be two functions"),
}


@pytest.mark.parametrize(("change", "text"), REFUSED.values(), ids=REFUSED)
def test_what_a_host_gives_wrong_is_refused_on_all_ranks(change, text):
    def work(world):
        given = given_of(world.rank)
        with pytest.raises(Refused, match=text):
            part_of_domain(**(change(given) if world.rank == 1 else given), world=world)

    run_ranks(work, 3)


ALONE = [name for name in REFUSED if name != "a node of two ranks"]


@pytest.mark.parametrize("name", ALONE)
def test_it_is_refused_on_one_rank_too(name):
    change, text = REFUSED[name]
    with pytest.raises(Refused, match=text.replace("rank 1", "rank 0")):
        part_of_domain(**change(given_of(0, 1)), world=World.alone())


def spoilt(host, how):
    def forward(table):
        host.forward(table)
        if how == "forward":
            table[len(host.owned) :] = table[len(host.owned) :].flip(0)
        if how == "float32" and table.dtype is torch.float32:
            table[len(host.owned) :] = 0

    def reverse(table):
        kept = table.clone()
        host.reverse(table)
        if how == "reverse":
            table[: len(host.owned)] = kept[: len(host.owned)]

    return forward, reverse


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("forward", r"forward brings other rows than its ids say: of float64, \d+ of \d+ rows .* row \d+, node \d+"),
        ("reverse", r"reverse brings other rows"),
        ("float32", r"forward brings .* of float32"),
    ],
)
def test_functions_that_bring_other_rows_are_refused_on_all_ranks(how, text):
    shared = Shared(3)

    def work(world):
        host = host_of(world.rank, 3, shared)
        exchange = spoilt(host, how if world.rank == 1 else "")
        given = given_of(world.rank)
        with pytest.raises(Refused, match=text):
            part_of_domain(**given, world=world, exchange=exchange)

    run_ranks(work, 3)


def test_functions_that_one_rank_alone_gives_are_refused_on_all():
    def work(world):
        exchange = (print, print) if world.rank == 1 else None
        with pytest.raises(Refused, match="exchange is given on rank 1, but None on the others"):
            part_of_domain(**given_of(world.rank), world=world, exchange=exchange)

    run_ranks(work, 3)


def test_counts_of_rows_that_do_not_match_are_refused_on_all_ranks_though_their_sum_does():
    def work(world):
        part = part_of_domain(**given_of(world.rank), world=world)
        count = part.plan.num_owned + {0: 1, 1: -1}.get(world.rank, 0)
        with pytest.raises(Refused, match=r"part.nodes: \d+ rows .*\d+ nodes"):
            part.nodes(torch.ones(count))
        with pytest.raises(ValueError, match=r"images: part.nodes\(x\)"):
            part.nodes_from_local(torch.ones(part.plan.num_local))

    run_ranks(work, 3)


def test_what_has_no_exact_form_is_refused_in_a_domain_as_well():
    def work(world):
        part = part_of_domain(**given_of(world.rank), world=world)
        x = part.nodes(torch.ones(part.plan.num_owned, 2))
        with pytest.raises(NotExact):
            x @ x.T

    run_ranks(work, 3)
