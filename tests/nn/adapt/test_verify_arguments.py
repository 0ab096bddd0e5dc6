"""Arguments for a verification: from `inputs`, or from the fields of a PyG `Data`."""

import pytest
import torch
from torch import nn
from verified_networks import ENDS, NUM_EDGES, NUM_NODES, Net, X, verified

from domainpar.nn.adapt.verify import verify


def test_arguments_that_are_not_marked_are_refused_and_wrong_ones_named():
    found = verified(Net(), inputs=lambda part: (X[part.local_ids], part.edge_index))
    assert "is not marked" in found.refused
    found = verified(Net(), inputs=lambda part: (part.nodes_from_local(X[: len(part.local_ids)]), part.edge_index))
    assert found.first_difference.note == "in the arguments themselves"
    assert "part.nodes" in found.advice


def test_arguments_may_be_named_or_a_single_one():
    assert verified(Net(), inputs=lambda part: {"x": part.nodes(X), "edge_index": part.edge_index}).exact
    assert verified(nn.Linear(4, 2), inputs=lambda part: part.nodes(X)).exact


@pytest.mark.parametrize(
    ("graph", "words"),
    [((ENDS, NUM_NODES), "pass inputs"), (ENDS, r"a PyG Data or a tuple"), ((ENDS, NUM_NODES, 3), "a PyG Data")],
)
def test_what_is_no_graph_or_says_too_little_is_refused(graph, words):
    with pytest.raises(ValueError, match=words):
        verify(Net(), graph)


class TakesData(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, data):
        x = self.lin(data.x)
        at_ends = x.new_zeros(data.num_nodes, 3).index_add(0, data.edge_index[1], x[data.edge_index[0]])
        return at_ends * data.node_weight[:, None], x[data.edge_index[0]] * data.edge_attr


class TakesFields(nn.Module):
    def forward(self, x, edge_index, edge_attr, pos=None, other=None):
        return x[edge_index[0]].sum(-1, keepdim=True) * edge_attr + pos[edge_index[1]].sum(-1, keepdim=True)


def data(**fields):
    Data = pytest.importorskip("torch_geometric.data").Data
    return Data(x=X, edge_index=ENDS, edge_attr=torch.arange(float(NUM_EDGES))[:, None], pos=X[:, :3] ** 2, **fields)


def test_fields_of_a_data_are_taken_by_their_names():
    assert verify(TakesFields(), data(faces=torch.zeros(3))).exact
    assert verify(TakesFields(), data(num_nodes=NUM_NODES)).exact
    graph = data(node_weight=torch.arange(float(NUM_NODES)), train_mask=X[:, 0] > 0, num_nodes=NUM_NODES)
    found = verify(TakesData(), graph)
    assert found.exact
    assert found.rows[-1].rows == "nodes, edges"
    assert graph.x is X
    assert graph.num_nodes == NUM_NODES


def test_fields_of_a_data_whose_rows_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="field faces.*not known; pass inputs"):
        verify(TakesData(), data(faces=torch.zeros(3)))
    with pytest.raises(ValueError, match=f"field y, of shape .{NUM_EDGES},., are taken for nodes.*pass inputs"):
        verify(TakesData(), data(y=torch.zeros(NUM_EDGES)))
    with pytest.raises(ValueError, match="forward asks for edge_attr"):
        verify(TakesFields(), type(data())(x=X, edge_index=ENDS))


def test_a_layer_of_pyg_shows_its_parts():
    GCNConv = pytest.importorskip("torch_geometric.nn").GCNConv
    found = verify(GCNConv(4, 3), data(), parts=2)
    assert found.exact
    assert [row.name for row in found.rows] == ["lin", "aggr_module", ""]
