"""Weather on a sphere: an encoder, processor and decoder learn how wind carries a tracer. One graph, many time steps.

Start it with `python`, `mpiexec -n 4 python` or `torchrun --nproc-per-node 4`, then `examples/sphere.py`."""

import argparse

import torch
from torch import Tensor, nn

from domainpar import World, parallelize, split_graph


class Forecast(nn.Module):
    """The next field from the last two: features of each point, messages between neighbours, a change of the field."""

    def __init__(self, width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, width), nn.Linear(width, 1)
        self.processor = nn.ModuleList(nn.Linear(2 * width + 3, width) for _ in range(rounds))

    def forward(self, before: Tensor, now: Tensor, place: Tensor, edge_index: Tensor) -> Tensor:
        x, (src, dst) = self.encoder(torch.cat([before[:, None], now[:, None], place], dim=1)), edge_index
        for message in self.processor:
            sent = nn.functional.silu(message(torch.cat([x[src], x[dst], place[src] - place[dst]], dim=1)))
            x = x + nn.functional.layer_norm(torch.zeros_like(x).index_add(0, dst, sent), x.shape[1:])
        return now + self.decoder(x).squeeze(1)


def tracer(place: Tensor, time: float) -> Tensor:
    """A pattern that the wind, a rotation about a tilted axis, has carried for some time."""
    wind = torch.tensor([[0.0, -1.0, 0.4], [1.0, 0.0, 0.0], [-0.4, 0.0, 0.0]])
    return (3 * place @ torch.matrix_exp(time * wind)).sin().sum(dim=1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
if torch.distributed.is_torchelastic_launched():  # a process group of our own; else those of mpiexec, or one rank
    torch.distributed.init_process_group("gloo")
world = World.from_process_group() if torch.distributed.is_initialized() else World.launch()
lat, lon = torch.meshgrid(torch.linspace(-85, 85, 18).deg2rad(), torch.linspace(0, 350, 36).deg2rad(), indexing="ij")
points = torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=-1).view(-1, 3)
near = torch.cdist(points, points).fill_diagonal_(2).topk(8, largest=False).indices.flatten()  # directed
part = split_graph(torch.stack([near, torch.arange(len(near)) // 8]), len(points), world)  # once
place, area = part.nodes(points), lat.cos().flatten()
optimizer = torch.optim.Adam((model := parallelize(Forecast(), world)).parameters(), lr=3e-3)
for time in (0.2 * step for step in range(parser.parse_args().steps)):
    before, now, after = (tracer(place, t) for t in (time - 0.2, time, time + 0.2))  # each rank at its points only
    error = (model(before, now, place, part.edge_index) - after) ** 2
    loss = (error * area).sum() / area.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if world.is_root:
        print(f"time {time:.1f}: loss {loss.item()!r}")
world.close()
if torch.distributed.is_initialized():  # its threads could abort a process that ends without this
    torch.distributed.destroy_process_group()
