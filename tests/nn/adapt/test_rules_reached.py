"""Every rule has a use: a layer or model of torch_geometric, a pattern of others' models, or an idiom reaches it.

A rule that its own unit tests alone reach is code that nobody needs: such calls are refused by name.
"""

import importlib
import pkgutil
import sys
import threading
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

import survey  # imports PyG itself
from survey_cases import CONVOLUTIONS, MODULES, WHOLE_MODELS
from test_patterns import EXACT as PATTERNS
from whole_and_split import NUM_RANKS, USUAL, cases, check, trial_of

from domainpar.nn.adapt import rules

ALONE = {"against": "alone"}  # torch draws other numbers


def attention_in_time(series, net):
    """Attention among the steps of each node, which is the batch."""
    return net(series, series, series)[0]


def bins(v):
    return torch.bincount(torch.bucketize(v, torch.linspace(-1, 1, 5, dtype=v.dtype)), minlength=6) * v[0]


IDIOMS = {
    "types of nodes": (lambda x, batch, net: x + net(batch), {"net": lambda: nn.Embedding(3, 4)}),
    "two types of each node": lambda x, batch, table: x + table[torch.stack([batch, 2 - batch], 1)].sum(1),
    "attention within a node": lambda vectors: F.scaled_dot_product_attention(vectors, vectors, vectors),
    "attention in time": (attention_in_time, {"net": lambda: nn.MultiheadAttention(3, 1)}),
    "columns of norm 1": lambda x: F.normalize(x, dim=0),
    "a system for each node": lambda vectors: torch.linalg.solve(
        vectors.mT @ vectors + torch.eye(2, dtype=vectors.dtype), vectors.mT
    ),
    "noise": (lambda x: x + 0.1 * torch.randn_like(x) + torch.empty_like(x).normal_(0, 0.1), ALONE),
    "edges dropped": (lambda e: e[torch.rand(e.size(0)) > 0.3].sum(0), ALONE),
    "nodes dropped": (lambda x: x * torch.bernoulli(torch.full_like(x[:, :1], 0.7)), ALONE),
    "a choice of experts": (lambda x: F.gumbel_softmax(x) * x, ALONE),
    "an activation with noise, in evaluation": lambda x: F.rrelu(x),
    "sizes as values": lambda x: x / torch.tensor(x.size(0)) * x.new_tensor(2.0),
    "readouts": lambda x, mask: x.logsumexp(0) * (x.softmax(0) * x).sum(0) / x.norm(dim=0) * mask.any(),
    "the node that scores most": lambda x: x[x[:, 0].argmax()],
    "bins": bins,
    "some of the first nodes": lambda x: x[:5] * 2,
    "an entry for each node": lambda x, batch: x.log_softmax(1)[torch.arange(x.size(0)), batch],
    "a table by the types of both ends": lambda table, batch, src, dst: table[batch[src], batch[dst]],
    "heads": lambda x: x.unflatten(1, (2, 2)).select(1, 0) + x.narrow(1, 0, 2),
}

# Cases, and functions of rules that one is the first here to reach. A function may be left out of the list of a case
# that reaches it, too; each stands somewhere.
REACHED = {
    "GAT (jk lstm, norm pair, dropout 0.5)": "elementwise._compared_or_values elementwise._equal_ends "
    "elementwise.changed elementwise.elementwise elementwise.find_place elementwise.keep elementwise.without_rows "
    "matrix_products.linear matrix_products.product matrix_products.recurrent mixtures.mixing new_tensors._drawn "
    "new_tensors._ids new_tensors._rows_of_sizes new_tensors.arange new_tensors.count new_tensors.dropout "
    "new_tensors.filled new_tensors.room new_tensors.size reductions._reduced reductions.add_up "
    "reductions.total_over_rows scatters._at_rows scatters.scatter selections._basic "
    "selections._one_for_each_dimension selections._plain selections._takes_all selections.getitem "
    "selections.index_select selections.read_rows selections.select_by_mask selections.selection_of "
    "shapes._may_be_rows shapes._moved shapes._names_behind_each_other shapes._names_of_copies "
    "shapes._parts_the_pieces shapes._row_dim_and_shape shapes._rows_of_input shapes._sizes_of shapes._solved "
    "shapes._split_or_merged shapes.cat shapes.expand shapes.reorder shapes.repeat shapes.squeeze shapes.stacks "
    "shapes.view",
    "GIN (norm layer_norm, three graphs)": "reductions._best_here reductions._extreme reductions._refuse_nothing "
    "reductions._root reductions.extreme reductions.extreme_over_rows reductions.moments reductions.spread "
    "scatters._at_graphs",
    "GCN2Conv": "matrix_products.add_and_multiply matrix_products.matmul scatters._write scatters.write_rows "
    "selections._cut selections._read_any_shape shapes.flip",
    "LINKX": "reductions.batch_norm scatters._dealt",
    "GCNConv (decomposed)": "shapes.split",
    "MFConv": "selections.nonzero",
    "SuperGATConv (MX, loss of given edges)": "reductions.loss",
    "FastRGCNConv": "scatters._into_columns",
    "HeteroBatchNorm": "scatters.distinct",
    "global_max_pool (no batch vector)": "reductions.first_over_rows",
    "global_max_pool (one event)": "scatters._extreme",
    "MulAggregation (one event)": "scatters._product",
    "CorrectAndSmooth": "elementwise.one_hot",
    "HEPT gatedgnn": "shapes._given_to_each shapes._repeated_for_each shapes.repeat_interleave",
    "acorn InteractionGNN undirected": "shapes.piece_of shapes.unbind",
    "deep_gcns GENConv softmax, MRConv": "new_tensors.filled_like selections.gather",
    "PyG-temporal STConv": "matrix_products._stays matrix_products.convolution",
    "gnn_tracking HeterogeneousResFCNN": "mixtures.among",
    "DIFFormer attention": "matrix_products.einsum",
    "ogb gin virtual node": "selections.rows_at",
    "CGCNN, neighbours by a table of ends": "shapes.flatten",
    "types of nodes": "elementwise.embedding",
    "two types of each node": "selections._table",
    "attention within a node": "matrix_products.attention",
    "attention in time": "matrix_products.multi_head_attention",
    "columns of norm 1": "mixtures._normalized",
    "a system for each node": "mixtures.solve",
    "noise": "new_tensors._drawn_by_rows new_tensors._normal new_tensors.numbers new_tensors.written_over",
    "edges dropped": "new_tensors._uniform",
    "nodes dropped": "new_tensors.bernoulli",
    "a choice of experts": "new_tensors.gumbel_softmax",
    "an activation with noise, in evaluation": "new_tensors.other_draws",
    "sizes as values": "new_tensors.new_tensor",
    "readouts": "reductions.logsumexp reductions.softmax_over_rows reductions.norm reductions.truth",
    "the node that scores most": "reductions.place_of_extreme",
    "bins": "scatters.bincount",
    "some of the first nodes": "selections._mask_of_places",
    "an entry for each node": "selections._several",
    "heads": "shapes.unflatten shapes.in_brackets",
}
OTHERWISE = {
    "reductions.reduction": "makes rules, when the file is imported",
    "refusals.refused": "no case that is exact: tests of refusals reach it",
    "scatters.scatter_of_torch_scatter": "of a library that is not installed here: deep_gcns and older code use it",
}


def functions_of_rules():
    """The code of every function of the rules, and its name with its file's."""
    modules = [importlib.import_module(f"{rules.__name__}.{it.name}") for it in pkgutil.iter_modules(rules.__path__)]
    return {
        function.__code__: f"{module.__name__.rpartition('.')[2]}.{function.__name__}"
        for module in modules
        for function in vars(module).values()
        if isinstance(function, FunctionType) and function.__module__ == module.__name__
    }


def trial_named(name):
    """The run of a case, of any of the three kinds."""
    of_survey = [*MODULES, *(case for of in (CONVOLUTIONS, WHOLE_MODELS) for group in of.values() for case in group)]
    for case in of_survey:
        if str(case) == name:
            return survey._trial(case, "incident", None)
    found = {**PATTERNS, **IDIOMS}[name]
    function, more = found if isinstance(found, tuple) else (found, {})
    net = None if "net" not in more else more["net"]().double()
    return trial_of(function, more.get("sample", USUAL), net, "incident")


@pytest.mark.parametrize("name", REACHED)
def test_a_case_reaches_the_rules_that_are_said_to_need_it(name):
    trial, names, reached = trial_named(name), functions_of_rules(), set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code in names:
            reached.add(names[frame.f_code])

    before = sys.getprofile()
    threading.setprofile(note)  # of the threads that are the ranks
    try:
        split = trial.split(NUM_RANKS)
    finally:
        threading.setprofile(before)
    assert split.failure is None, split.failure
    assert set(REACHED[name].split()) - reached == set()


def test_every_function_of_the_rules_is_reached_by_a_case():
    listed = [function for of_case in REACHED.values() for function in of_case.split()]
    assert sorted(listed) == sorted(set(functions_of_rules().values()) - OTHERWISE.keys())
    assert OTHERWISE.keys() <= set(functions_of_rules().values())


@cases(IDIOMS)
def test_idioms_are_exact(function, more):
    check(function, **more)
