"""Parameters that torch shards over ranks are refused by name, wherever in a program that is done."""

import torch
import torch.distributed as dist
from torch import nn
from whole_and_split import USUAL

from domainpar import parallelize, split_graph
from domainpar.testing import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, edge_index):
        return torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])


def shard_somewhere(world):
    """The refusals of models that are sharded before and after, wholly and in part, by each way of torch."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (world.size,))
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    x = part.nodes(USUAL.x.float())

    def before(net):
        fully_shard(net, mesh=mesh)
        parallelize(net, world)

    def of_a_layer(net):
        model = parallelize(net, world)
        fully_shard(net.linear, mesh=mesh)
        model(x, part.edge_index)

    def after(net):
        model = parallelize(net, world)
        fully_shard(model, mesh=mesh)
        model(x, part.edge_index)

    def of_old(net):
        parallelize(FullyShardedDataParallel(net, device_id=torch.device("cpu")), world)

    def around(net, **how):
        model = FullyShardedDataParallel(parallelize(net, world), device_id=torch.device("cpu"), **how)
        model(x, part.edge_index)

    def around_parameters(net):
        around(net, use_orig_params=True)

    def of_tensors(net):
        parallelize_module(net, mesh, {"linear": ColwiseParallel()})
        parallelize(net, world)

    said = {}
    for shard in (before, of_a_layer, after, of_old, around, around_parameters, of_tensors):
        try:
            shard(Net())
        except Exception as error:
            said[shard.__name__] = f"{type(error).__name__}: {error}"
    return said


def test_parameters_that_are_sharded_are_refused_by_name_on_all_ranks():
    for said in run_ranks(shard_somewhere, 2, transport="gloo"):
        assert len(said) == 7, said.keys()
        for name, text in said.items():
            assert "sharded over ranks" in text, (name, text)
