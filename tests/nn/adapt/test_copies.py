"""Copies of parallel models, averages of their weights, and what can be saved: the ranks cannot, and it is said so."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from whole_and_split import USUAL

from domainpar import parallelize, split_graph
from domainpar.nn.adapt.rows import UNKNOWN, rows_of
from domainpar.testing import run_ranks

PAGE = Path(__file__).parents[3] / "docs/recipes/model_averages.md"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x, edge_index):
        return x + torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])


class Keeping(Net):
    """It keeps its graph."""

    def forward(self, x, _=None):
        return super().forward(x, self.edge_index)


def started(world, net):
    part = split_graph(USUAL.edge_index, USUAL.num_nodes, world)
    return part, parallelize(copy.deepcopy(net), world)


def step(part, model, optimizer, x, edge_index):
    optimizer.zero_grad()
    part.node_mean_share(model(x, edge_index) ** 2).backward()
    model.reduce_gradients()
    optimizer.step()


def average_of_steps(world, net, of_whole):
    """Weights, their average over some steps, and its result, summed: by the page's lines or of the whole model."""
    part, model = started(world, net)
    x, edge_index = part.nodes(USUAL.x), part.edge_index
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    text = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    here = {"torch": torch, "model": model, "world": world, "parallelize": parallelize, "AveragedModel": AveragedModel}
    here |= {"x": USUAL.x, "part": part, "steps": range(4)}
    if of_whole:
        here["ema"] = AveragedModel(model, use_buffers=False)
        for _ in range(4):
            step(part, model, optimizer, x, edge_index)
            here["ema"].update_parameters(model)
        here["result"] = here["ema"](x, edge_index)
    else:
        exec(text, here | {"train_one_step": lambda _: step(part, model, optimizer, x, edge_index)}, here)
    return [part.all_reduce(here["result"].sum(0)), *(it.detach() for it in here["ema"].parameters())]


def average_by_torch(net, weigh):
    net = copy.deepcopy(net)
    ema, optimizer = AveragedModel(net, **weigh), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (net(USUAL.x, USUAL.edge_index) ** 2).mean().backward()
        optimizer.step()
        ema.update_parameters(net)
    return [ema(USUAL.x, USUAL.edge_index).sum(0).detach(), *(it.detach() for it in ema.parameters())]


@pytest.mark.parametrize("of_whole", [False, True], ids=["as the page says", "of the whole model"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_average_of_weights_is_that_of_one_rank(num_ranks, of_whole):
    net = Net()
    weigh = {} if of_whole else {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)}
    for found in run_ranks(average_of_steps, num_ranks, net, of_whole):
        torch.testing.assert_close(found, average_by_torch(net, weigh), rtol=1e-12, atol=1e-14)


def compare_copies(world, net):
    part, model = started(world, net)
    x = part.nodes(USUAL.x)
    model.module.edge_index = part.edge_index
    copies = [copy.deepcopy(model), copy.deepcopy([model])[0], copy.deepcopy({"a": (model, world)})["a"][0]]
    for each in copies:
        assert each.world is world
        assert each.module is not model.module
        assert torch.equal(each(x), model(x))
        assert torch.equal(each(copy.deepcopy(x)), model(x))
        step(part, each, torch.optim.SGD(each.parameters(), 0.1), x, part.edge_index)
        assert not torch.equal(each(x), model(x))
    return copy.deepcopy(part) is part


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def save_what_can_be(world, net):
    part, model = started(world, net)
    with torch.no_grad():
        result = model(part.nodes(USUAL.x), part.edge_index)
    for tensor in (result, part.nodes(USUAL.x), part.edges(USUAL.e), part.edge_index, part.local_ids, part.src):
        for again in (saved(tensor), pickle.loads(pickle.dumps(tensor))):
            assert torch.equal(again, tensor)
            assert rows_of(again) is UNKNOWN
    model.module.edge_index = part.edge_index
    pickle.loads(pickle.dumps(model.module))  # it keeps a graph, which comes back as plain numbers
    saved(torch.optim.Adam(model.parameters()).state_dict())
    said = []
    for value in (model, part, world, [model], {"part": part}, AveragedModel(model)):
        for save in (saved, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to ranks that run now") as refused:
                save(value)
            said.append(str(refused.value))
    return said


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_copies_of_a_model_share_its_ranks(num_ranks):
    assert all(run_ranks(compare_copies, num_ranks, Keeping()))


@pytest.mark.parametrize(("num_ranks", "transport"), [(1, "threads"), (3, "threads"), (2, "gloo")])
def test_tensors_of_a_part_are_saved_as_plain_ones_and_ranks_are_not(num_ranks, transport):
    for said in run_ranks(save_what_can_be, num_ranks, Net(), transport=transport):
        assert all("model.module" in text for text in said)
