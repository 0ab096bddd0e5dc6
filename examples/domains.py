"""Forces of a network inside a code that owns its domains: slabs of a periodic box, with ghosts of its own.

torchrun --nproc-per-node 2 examples/domains.py

`Domain` stands for such a code: it knows nothing of `domainpar`. In every step each process finds its ghosts, computes
forces on its own atoms, moves them, and gives away those that leave. The middle of the box is empty, so the second of
three processes owns no atom. Process 0 compares with the whole box, which it computes by itself.
"""

import argparse
import copy
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from domainpar import World, parallelize, part_of_domain

REACH, NUM_ATOMS, KINDS, WIDTH = 1.6, 120, 3, 12
BOX = torch.tensor([20.0, 3.0, 3.0], dtype=torch.float64)
SHIFTS = [torch.tensor(shift) * BOX for shift in itertools.product((0, -1, 1), repeat=3)]


class Energy(nn.Module):
    """Energy of all atoms from messages that are weighted by functions of distance; `vector` is from src to dst."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.energy = nn.Embedding(KINDS, WIDTH), nn.Linear(WIDTH, 1)
        self.filters = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(2))

    def forward(self, kind: Tensor, edge_index: Tensor, vector: Tensor) -> Tensor:
        (src, dst), x = edge_index, self.kinds(kind)
        distance = vector.square().sum(1, keepdim=True).sqrt()
        shells = torch.exp(-8 * (distance - torch.linspace(0.2, REACH, 8)) ** 2) * (1 - distance / REACH) ** 2
        for weights in self.filters:
            x = x + torch.zeros_like(x).index_add(0, dst, weights(shells) * x[src]).tanh()
        return self.energy(x).sum()


def from_all(mine: object) -> list:
    """What each process has."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Domain:
    """The atoms of one slab, [own atoms | ghosts], and the exchanges of their rows.

    Attributes:
        ghost_ids, shifts: The atom of each ghost row, and where that image lies from it, [num_ghosts, 3].
        edge_index: Local rows of all pairs within REACH that end at own atoms, [2, num_edges].
    """

    def __init__(self, ids: Tensor, place: Tensor) -> None:
        self.num_owned, self.rank, self.size = len(ids), dist.get_rank(), dist.get_world_size()
        low, high = torch.zeros(3) - REACH, BOX + REACH
        low[0], high[0] = (BOX[0] * (self.rank + more) / self.size + (2 * more - 1) * REACH for more in (0, 1))
        self.wanted, ghost_ids, shifts, places = [], [], [], [place]
        for owner, (theirs, at) in enumerate(from_all((ids, place))):
            rows = []
            for number, shift in enumerate(SHIFTS):
                near = ((at + shift > low) & (at + shift < high)).all(1) & (owner != self.rank or number > 0)
                rows.append(near.nonzero().view(-1))
                shifts.append(shift.expand(len(rows[-1]), 3))
                places.append(at[rows[-1]] + shift)
            self.wanted.append(torch.cat(rows))
            ghost_ids.append(theirs[self.wanted[-1]])
        self.ghost_ids, self.shifts = torch.cat(ghost_ids), torch.cat(shifts)
        self.asked = [wanted[self.rank] for wanted in from_all(self.wanted)]
        away = (torch.cat(places)[:, None] - place).norm(dim=2)
        self.edge_index = ((away < REACH) & (away > 0)).nonzero().T

    def forward(self, rows: Tensor) -> None:
        """Copy rows of own atoms to their ghosts on all processes."""
        rows[self.num_owned :] = torch.cat(self._swapped([rows[asked] for asked in self.asked], self.wanted))

    def reverse(self, rows: Tensor) -> None:
        """Add rows of ghosts to those of their atoms."""
        of_ghosts = list(rows[self.num_owned :].split([len(wanted) for wanted in self.wanted]))
        for asked, share in zip(self.asked, self._swapped(of_ghosts, self.asked)):
            rows.index_add_(0, asked, share)

    def _swapped(self, blocks: list[Tensor], like: list[Tensor]) -> list[Tensor]:
        """Give each process a block of rows; returns theirs, as long as `like`."""
        came = [blocks[0].new_empty(len(one), blocks[0].size(1)) for one in like]
        came[self.rank] = blocks[self.rank].clone()
        others = [peer for peer in range(self.size) if peer != self.rank]
        calls = [dist.isend(blocks[peer].contiguous(), peer) for peer in others if len(blocks[peer])]
        calls += [dist.irecv(came[peer], peer) for peer in others if len(came[peer])]
        for call in calls:
            call.wait()
        return came


def slab_of(*atoms: Tensor) -> tuple[Tensor, ...]:
    """Ids, places and speeds of the atoms that lie in this slab, of those that processes have."""
    ids, place, speed = (torch.cat(of_all) for of_all in zip(*from_all(atoms)))
    mine = (place[:, 0] * dist.get_world_size() / BOX[0]).long() == dist.get_rank()
    return ids[mine], place[mine], speed[mine]


def of_the_whole_box(model: nn.Module, ids: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Energy, and force on each atom, by plain torch."""
    place = place.clone().requires_grad_()
    vectors = torch.stack([place[:, None] - place[None] - shift for shift in SHIFTS])
    away = vectors.detach().norm(dim=3)
    _, dst, src = pairs = ((away < REACH) & (away > 0)).nonzero().T
    energy = model(ids % KINDS, torch.stack([src, dst]), vectors[tuple(pairs)])
    return energy.detach(), torch.autograd.grad(-energy, place)[0]


def main(steps: int) -> None:
    """Some steps of molecular dynamics, each compared with the whole box."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    alone = Energy()
    ids, speed = torch.randperm(NUM_ATOMS), torch.randn(NUM_ATOMS, 3)
    place = torch.rand(NUM_ATOMS, 3) * BOX * torch.tensor([0.6, 1.0, 1.0]) - torch.tensor([6.0, 0.0, 0.0])
    place = place % BOX
    ids, place, speed = slab_of(*(rows[dist.get_rank() :: dist.get_world_size()] for rows in (ids, place, speed)))
    world = World.from_process_group()
    model = parallelize(copy.deepcopy(alone), world)
    for step in range(steps):
        domain = Domain(ids, place)
        exchange = (domain.forward, domain.reverse)
        part = part_of_domain(domain.edge_index, ids, domain.ghost_ids, world, exchange=exchange)
        # Ghosts have the places of their atoms, so each edge says from which image it comes.
        shifts = torch.cat([torch.zeros_like(place), domain.shifts])[domain.edge_index[0]]
        x, (src, dst) = part.nodes(place).requires_grad_(), part.edge_index
        energy = model(part.nodes(ids % KINDS), part.edge_index, x[dst] - x[src] - part.edges(shifts))
        (force,) = torch.autograd.grad(-energy, x)
        force = part.to_local(force)  # of this slab's atoms, in their order
        all_ids, places, forces = (torch.cat(of_all) for of_all in zip(*from_all((ids, place, force))))
        if dist.get_rank() == 0:
            wanted = of_the_whole_box(alone, all_ids, places)
            off = (
                energy.item() / wanted[0].item() - 1,
                ((forces - wanted[1]).abs().max() / wanted[1].abs().max()).item(),
            )
            print(f"step {step}: energy {energy.item()!r}, off by {abs(off[0]):.1e}, forces off by {off[1]:.1e}")
        speed = speed + 0.02 * force
        if step < steps - 1:
            ids, place, speed = slab_of(ids, (place + 0.05 * speed) % BOX, speed)
    held = torch.cat([ids, domain.ghost_ids])
    print(f"process {dist.get_rank()}: {len(ids)} atoms, {len(domain.ghost_ids)} ghosts, {len(held.unique())} held")
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    main(parser.parse_args().steps)
