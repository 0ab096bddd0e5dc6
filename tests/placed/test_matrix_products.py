"""Products, layers, convolutions and attention: a row by itself, or sums over all rows; norms by layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_and_split import ODD, check, run, sums


class Weighted(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.bias = nn.Parameter(torch.randn(4))


ENOUGH = [name for name, sample in ODD.items() if sample.num_nodes > 1]


EXACT = {
    "a layer": (lambda x, e, net, src: net(x)[src] + net(e), {"net": lambda: nn.Linear(4, 3)}),
    "a layer of sums": (lambda x, src, dst, e, net: net(sums(x, src, dst, e))[src], {"net": lambda: nn.Linear(4, 4)}),
    "a bilinear layer": (lambda x, z, net: net(x, z), {"net": lambda: nn.Bilinear(4, 4, 3)}),
    "weights": lambda x, table: x @ table.t() + torch.mm(x, table.t()) + (table @ x.t()).t(),
    "a bias of rows": (
        lambda x, net: F.linear(x, net.weight, bias=x[:, 0]),
        {"net": lambda: nn.Linear(4, 4), "sample": ODD["as many nodes as features"]},
    ),
    "a vector of weights": lambda x, c: x @ c + torch.mv(x, c) + c @ x.t() + x.matmul(c),
    "over rows": lambda x, z: (x.t() @ z, x.t().matmul(z), z.t() @ z[:, 0]),
    "over edges": lambda e, w: e.t() @ w + w @ e,
    "linear attention": lambda x, z: (x.softmax(1) @ (z.softmax(0).t() @ x)) / x.size(1),
    "matrices of each row": lambda vectors: (
        vectors @ vectors.transpose(1, 2) + torch.bmm(vectors, vectors.transpose(1, 2))
    ),
    "matrices of each row by weights": lambda vectors, c: (
        vectors @ c.view(2, 2) + (c[:3].view(1, 3) @ vectors).squeeze(1)[:, None]
    ),
    "matrices of each row by a vector": lambda vectors, c: vectors @ c[:2] + (c[:3] @ vectors)[:, :1],
    "batches of weights": (lambda x, net: x @ net.weight, {"net": lambda: Weighted(2, 4, 3)}),
    "steps by weights": lambda series, c: series @ c[:3].view(3, 1) + series @ torch.ones(2, 3, 1, dtype=series.dtype),
    "added products": (lambda x, net: torch.addmm(net.bias, x, net.weight), {"net": lambda: Weighted(4, 4)}),
    "added products with factors": (
        lambda x, net: torch.addmm(x, x, net.weight, beta=0.5, alpha=2),
        {"net": lambda: Weighted(4, 4)},
    ),
    "einsum of rows": lambda x, z, table: (
        torch.einsum("nf,nf->n", x, z),
        torch.einsum("nf,kf->kn", x, table),
        torch.einsum("n f , k f -> n k", x, table),
    ),
    "einsum over rows": lambda x, z, v: (
        torch.einsum("nf,ng->fg", x, z),
        torch.einsum("nf,n->f", x, v),
        torch.einsum("nf->", x),
        torch.einsum("nf->f", [x]),
    ),
    "einsum of sums": lambda x, src, dst, e: torch.einsum("nf,nf->n", x, sums(x, src, dst, e))[src],
    "einsum with dots": lambda x, c, vectors, table, series: (
        torch.einsum("...f,f->...", x, c),
        torch.einsum("...f,kf", x, table),
        torch.einsum("...ab,...cb->...ac", vectors, vectors),
        torch.einsum("...ab,b->a...", vectors, c[:2]),
        torch.einsum("...f,...f->...", series, c[:3].view(1, 1, 3)),
        torch.einsum("... f, ... f -> f", x, c.view(1, 4)),
    ),
    "einsum whose result is not said": lambda x, z, table, v: (
        torch.einsum("nf,kf", x, table),
        torch.einsum("nf,nf", x, z),
        torch.einsum("ba", x),
        torch.einsum("nB,nA", x, z),
        torch.einsum(x, [0, 1], table, [2, 1], [2, 0]),
    ),
    "a sequence for each row": (lambda vectors, net: net(vectors)[0], {"net": lambda: nn.LSTM(2, 3, batch_first=True)}),
    "a sequence of steps": (lambda series, net: net(series)[0] + net(series)[1][0], {"net": lambda: nn.GRU(3, 3)}),
    "a convolution over features": (lambda vectors, net: net(vectors), {"net": lambda: nn.Conv1d(3, 2, 2)}),
    "pooling of features": lambda vectors: (
        F.max_pool1d(vectors, 2) + F.avg_pool1d(vectors, 2) + F.adaptive_avg_pool1d(vectors, 1)
    ),
    "pooling of pictures": lambda series, vectors: (F.max_pool2d(vectors, 2), F.avg_pool1d(series.transpose(0, 1), 2)),
    "a convolution backwards": (
        lambda vectors, net: net(vectors[:, None]),
        {"net": lambda: nn.ConvTranspose2d(1, 2, (1, 2), (1, 2))},
    ),
    "a convolution within rows of a picture": (
        lambda series, net: (net(series), F.conv2d(series, net.weight, dilation=(3, 1), padding="valid")),
        {"net": lambda: nn.Conv2d(2, 3, (1, 2))},
    ),
    "a convolution of one picture": (
        lambda vectors, net: net(vectors.transpose(0, 1)),
        {"net": lambda: nn.Conv2d(3, 4, (1, 2), padding=(0, 1), padding_mode="circular")},
    ),
    "a convolution within columns": (
        lambda series, net: net(series.transpose(1, 2)),
        {"net": lambda: nn.Conv2d(2, 3, (3, 1))},
    ),
    "attention within each row": lambda vectors, mask: (
        F.scaled_dot_product_attention(vectors, vectors, vectors * 2),
        F.scaled_dot_product_attention(vectors, vectors, vectors, attn_mask=torch.ones(3, 3, dtype=torch.bool).tril()),
        F.scaled_dot_product_attention(vectors, vectors, vectors, attn_mask=mask.view(-1, 1, 1).double()),
    ),
    "heads of each row": (
        lambda vectors, net: (
            *net(vectors, vectors, vectors * 2),
            net(vectors, vectors, vectors, need_weights=False)[0],
        ),
        {"net": lambda: nn.MultiheadAttention(2, 2, batch_first=True)},
    ),
    "heads of each row, of sums and with masks": (
        lambda x, src, dst, e, net, mask: net(
            sums(x, src, dst, e).view(-1, 2, 2).transpose(0, 1),
            x.view(-1, 2, 2).transpose(0, 1),
            x.view(-1, 2, 2).transpose(0, 1),
            key_padding_mask=torch.stack([mask & ~mask, mask], 1),
            attn_mask=torch.ones(2, 2, dtype=torch.bool).triu(1),
        ),
        {"net": lambda: nn.MultiheadAttention(2, 1)},
    ),
    "a transformer of each row's entries": (
        lambda x, src, net: net(x.view(-1, 2, 2))[src],
        {"net": lambda: nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)},
    ),
    "a transformer of several layers in evaluation": (
        lambda vectors, net: net(vectors, is_causal=True, mask=nn.Transformer.generate_square_subsequent_mask(3)),
        {
            "net": lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(2, 1, 8, batch_first=True), 2, None, False
            ).eval()
        },
    ),
    "complex": lambda x: (x * 1j).t() @ (x + 1j),
    "over nodes and edges": (lambda x, e: x.t() @ e, {"sample": ODD["as many edges as nodes"]}),
    "over rows and what every rank has": lambda x: torch.ones(13, dtype=x.dtype) @ x,
    "a layer over rows": (lambda square, net: net(square.t()), {"net": lambda: nn.Linear(13, 2)}),
    "einsum with a constant of all rows": lambda x: torch.einsum("nf,n->f", x, torch.ones(13, dtype=x.dtype)),
    "a sequence of rows": (lambda x, net: net(x)[0], {"net": lambda: nn.LSTM(4, 3)}),
    "a sequence of rows in a batch": (lambda x, net: net(x[None])[0], {"net": lambda: nn.GRU(4, 3, batch_first=True)}),
    "a network that drops": (
        lambda series, net: net(series)[0],
        {"net": lambda: nn.GRU(3, 3, 2, dropout=0.5), "against": "alone"},
    ),
    "heads that drop": (
        lambda vectors, net: net(vectors, vectors, vectors)[0],
        {"net": lambda: nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True), "against": "alone"},
    ),
    "heads of rows and of every rank": (
        lambda vectors, net: net(vectors, *[torch.ones(13, 3, 2, dtype=vectors.dtype)] * 2)[0],
        {"net": lambda: nn.MultiheadAttention(2, 1, batch_first=True)},
    ),
    "attention with every rank's mask": lambda vectors: F.scaled_dot_product_attention(
        vectors, vectors, vectors, attn_mask=torch.ones(13, 3, 3, dtype=vectors.dtype)
    ),
    "inner products": lambda x, table, c: torch.inner(x, table) + torch.inner(x, c)[:, None],
    "inner products, from the left": lambda x, table: torch.inner(table, x),
    "inner products with a batch": lambda x, table: torch.inner(x, table.view(1, 3, 4)).sum(0),
    "inner products over rows": lambda v, u: torch.inner(v, u),
    "added over rows": lambda x, z, table: torch.addmm(table.new_zeros(4, 4), x.t(), z),
    "added in place": lambda x, table: (x * 1).addmm_(x, table.t() @ table),
    "added vectors": lambda x, c, v: torch.addmv(v, x, c),
    "added batches": lambda vectors: torch.baddbmm(
        vectors, vectors, torch.ones(1, 2, 2, dtype=vectors.dtype).expand(vectors.size(0), 2, 2)
    ),
    "a cell by rows and a constant": (lambda x, c, net: net(x, c.expand(13, 4)), {"net": lambda: nn.GRUCell(4, 4)}),
    "columns through a cell": (lambda columns, net: net(columns.t()), {"net": lambda: nn.GRUCell(4, 4)}),
    "of nodes, twice": (lambda x, net, src: net(x)[src], {"net": lambda: nn.BatchNorm1d(4), "calls": 2}),
    "of edges": (lambda e, net: net(e), {"net": lambda: nn.BatchNorm1d(4)}),
    "of some edges": (lambda e, edge_mask, net: net(e[edge_mask]), {"net": lambda: nn.BatchNorm1d(4)}),
    "averaged over all calls": (lambda x, net: net(x), {"net": lambda: nn.BatchNorm1d(4, momentum=None), "calls": 3}),
    "with its averages": (lambda x, net: net(x), {"net": lambda: nn.BatchNorm1d(4).eval()}),
    "without averages, not learning": (
        lambda x, net: net(x),
        {"net": lambda: nn.BatchNorm1d(4, track_running_stats=False).eval()},
    ),
    "of more dimensions": (lambda vectors, net: net(vectors), {"net": lambda: nn.BatchNorm1d(3)}),
    "of columns": (lambda columns, net: net(columns[None])[0], {"net": lambda: nn.BatchNorm1d(4)}),
    "of each column": (lambda x, net: net(x.t()[None])[0], {"net": lambda: nn.InstanceNorm1d(4, affine=True)}),
    "of each column with averages": (
        lambda x, net: net(x.t()[None])[0],
        {"net": lambda: nn.InstanceNorm1d(4, track_running_stats=True), "calls": 2},
    ),
    "of each row's matrix": (lambda vectors, net: net(vectors), {"net": lambda: nn.InstanceNorm1d(3)}),
    "of groups": (lambda x, net: net(x), {"net": lambda: nn.GroupNorm(2, 4)}),
    "single precision (2)": (
        lambda x, net: net(x.float().double()),
        {"net": lambda: nn.BatchNorm1d(4), "tolerance": 1e-6},
    ),
    "a feature for each node": (lambda square, net: net(square.t()), {"net": lambda: nn.BatchNorm1d(13)}),
    "a feature for each node, with averages": (
        lambda square, net: net(square.t()),
        {"net": lambda: nn.BatchNorm1d(13).eval()},
    ),
    "groups of rows": (lambda x, net: net(x.t()[None]), {"net": lambda: nn.GroupNorm(2, 4)}),
    "synchronised": (lambda x, net: net(x), {"net": lambda: nn.SyncBatchNorm(4).eval()}),
    "a column that is constant": (lambda x, net: net(x * 0 + 1), {"net": lambda: nn.BatchNorm1d(4)}),
    "no momentum": (lambda x, net: net(x), {"net": lambda: nn.BatchNorm1d(4, momentum=0.0), "calls": 2}),
    "by keywords": lambda x: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
    "of one matrix": (lambda x, net: net(x), {"net": lambda: nn.InstanceNorm1d(13)}),
    "weights of unit length": (
        lambda x, net: net(x),
        {"net": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))},
    ),
    "weights of unit norm": (
        lambda x, net: net(x),
        {"net": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "calls": 2},
    ),
    "orthogonal weights": (
        lambda x, net: net(x),
        {"net": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))},
    ),
}
REFUSED = {
    "every row with every other one": (lambda x: x @ x.t(), "all rows against all rows"),
    "nodes with edges": (lambda x, e: x @ e.t(), "all rows against all rows"),
    "over rows of a square": (lambda square, x: square @ x, "a table of all rows against all rows"),
    "weights that are rows": (lambda x, z: F.linear(x, z), "all rows against all rows"),
    "einsum of all pairs": (lambda x: torch.einsum("nf,mf->nm", x, x), "all rows against all rows"),
    "einsum of all pairs, not said": (lambda x: torch.einsum("...f,mf", x[:, None], x), "all rows against all rows"),
    "a convolution over rows": (lambda x, net: net(x.t()[None]), "mixes rows", {"net": lambda: nn.Conv1d(4, 4, 3)}),
    "a convolution along rows of a picture": (
        lambda series, net: net(series),
        "mixes rows",
        {"net": lambda: nn.Conv2d(2, 3, (2, 1))},
    ),
    "a convolution in steps of rows": (
        lambda series, net: net(series),
        "mixes rows",
        {"net": lambda: nn.Conv2d(2, 3, 1, stride=2)},
    ),
    "a convolution with rows more": (
        lambda series, net: net(series),
        "mixes rows",
        {"net": lambda: nn.Conv2d(2, 3, 1, padding=1)},
    ),
    "a convolution whose channels are rows": (
        lambda vectors, net: net(vectors),
        "mixes rows",
        {"net": lambda: nn.Conv2d(13, 3, 1)},
    ),
    "weights of a convolution that are rows": (lambda vectors: F.conv1d(vectors, vectors), "by weights that are rows"),
    "rows in pools": (lambda series: F.adaptive_avg_pool2d(series, 2), "mixes rows"),
    "pooling of rows": (lambda x: F.avg_pool1d(x.t(), 2), "mixes rows"),
    "attention between rows": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        "all rows against all rows",
    ),
    "heads of all rows": (
        lambda x, net: net(x, x, x)[0],
        "all rows against all rows",
        {"net": lambda: nn.MultiheadAttention(4, 1)},
    ),
    "heads of all rows of each step": (
        lambda series, net: net(series, series, series)[0],
        "all rows against all rows",
        {"net": lambda: nn.MultiheadAttention(3, 1, batch_first=True)},
    ),
    "a sparse matrix of edges": (
        lambda x, edge_index, w: torch.sparse.mm(torch.sparse_coo_tensor(edge_index, w, (13, 13)), x),
        "give the layer edge_index",
    ),
    "a transformer": (
        lambda x, net: net(x[None])[0],
        "attention of all rows to all rows",
        {"net": lambda: nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True)},
    ),
    "a transformer that does not learn": (
        lambda x, net: net(x[None])[0],
        "attention of all rows to all rows",
        {"net": lambda: nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True).eval()},
    ),
    "eigenvalues": (lambda square: torch.linalg.eigvalsh(square.detach()), "mixes rows"),
    "a singular value": (lambda x: torch.linalg.svdvals(x), "mixes rows"),
    "a diagonal of as many features": (
        lambda x: torch.einsum("ii->i", x),
        "torch.diagonal along rows",
        {"sample": ODD["as many nodes as features"]},
    ),
    "a trace": (lambda square: torch.einsum("ii->", square), "torch.diagonal along rows"),
    "groups of columns": (lambda columns, net: net(columns), "splits rows", {"net": lambda: nn.GroupNorm(2, 40)}),
    "local response": (lambda x: F.local_response_norm(x.t()[None], 2), "mixes rows"),
}


@pytest.mark.parametrize("name", ODD)
def test_products_do_not_take_a_dimension_for_rows_by_its_length(name):
    check(lambda x, z, table, e: (x @ table.t(), x.t() @ z, e.t() @ e, torch.einsum("nf,ng->fg", x, z)), ODD[name])
    check(lambda x: x @ x.t(), ODD[name], refused="all rows against all rows")


@pytest.mark.parametrize("name", ENOUGH)
def test_a_rank_without_rows_takes_part_in_norms(name):
    check(lambda x, net: net(x), ODD[name], net=lambda: nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("name", "function"), [("one node", lambda x, net: net(x)), ("one edge", lambda e, net: net(e))]
)
def test_one_row_is_too_few_on_every_rank(name, function):
    with pytest.raises(ValueError, match="more than 1 value"):
        run(function, ODD[name], net=lambda: nn.BatchNorm1d(4), ranks=(4,))
