"""Population-based training: eight networks with different learning rates, each trained by a group of ranks.

Start it with `python examples/population.py` or `mpiexec -n 4 python examples/population.py --ranks-of-group 2`. The
groups take the networks in turn; the same network is best on any number of ranks. After each round the worse half of
the networks continues from the weights of the better half."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from domainpar import World, parallelize, split_graph
from domainpar.common.agreement import gather

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20, help="steps of each network in a round")
parser.add_argument("--ranks-of-group", type=int, default=1)
options = parser.parse_args()
NUM_NODES, MEMBERS, ROUNDS = 500, 8, 4
torch.set_default_dtype(torch.float64)


class Smooth(nn.Sequential):
    """Layers of sums over neighbours."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self:
            x = layer(x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]).tanh()).tanh()
        return x.squeeze(1)


draw = torch.Generator().manual_seed(0)
x, edge_index = torch.randn(NUM_NODES, 8, generator=draw), torch.randint(NUM_NODES, (2, 3000), generator=draw)
y = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]).mean(1).tanh()
with World.session(domain_size=options.ranks_of_group) as world:
    group = World.over(world.domain, domain_size=world.domain.size)  # a world for the ranks of this group only
    part, rates, models = split_graph(edge_index, NUM_NODES, group), [1e-3 * 3**m for m in range(MEMBERS)], {}
    for member in range(world.data_group, MEMBERS, world.num_data_groups):
        torch.manual_seed(member)
        models[member] = parallelize(Smooth(nn.Linear(8, 16), nn.Linear(16, 1)), group)
    for number in range(ROUNDS):
        results = {}  # loss and weights of each network of this group
        for member, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=rates[member], momentum=0.9)
            for _ in range(options.steps):
                loss = mse_loss(model(part.nodes(x), part.edge_index), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            results[member] = loss.item(), [p.tolist() for p in model.parameters()]
        everyone = {int(m): result for of_rank in gather(world.transport, results) for m, result in of_rank.items()}
        order = sorted(everyone, key=lambda member: everyone[member][0])
        for better, worse in zip(order[: MEMBERS // 2], order[MEMBERS // 2 :]):
            rates[worse] = rates[better] * (1.5 if number % 2 else 0.7)
            for parameter, values in zip(models[worse].parameters() if worse in models else (), everyone[better][1]):
                parameter.data = torch.tensor(values)
        if world.is_root:
            print(f"round {number}: network {order[0]}, rate {rates[order[0]]:.1g}, loss {everyone[order[0]][0]!r}")
