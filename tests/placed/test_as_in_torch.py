"""What torch refuses on the whole graph fails alike on any number of ranks: no rank goes on alone."""

import pytest
import torch
import torch.nn.functional as F
from test_scatters import put
from whole_and_split import check_error

AS_IN_TORCH = {
    "a mask of edges on nodes": lambda x, edge_mask: x[edge_mask],
    "what every rank has, at ends": lambda table, src: table[src],
    "an item of rows": lambda v: v * v.item(),
    "whether rows are true": lambda v: v if v > 0 else v * 2,
    "sums of other rows": lambda x, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, x),
    "other rows written": lambda x, e, mask, edge_mask: put(x, mask, e[edge_mask]),
    "in place into what came": lambda x, src: x.mul_(2.0)[src],
    "pieces of other rows put together": lambda e, x: x.view(-1, 2)[:, :1] + e.view(-1, 2)[:, :1],
    "rows along a third dimension": lambda vectors: torch.hstack([vectors[..., 0], vectors[..., 0].t()]),
    "unflattened rows": lambda x: x.unflatten(0, (2, -1)),
    "a weighted mean of squares": lambda x, z, c: F.mse_loss(x, z, weight=c.abs()),
    "attention to a mask of pairs": lambda square, table: F.scaled_dot_product_attention(
        table, table, table, attn_mask=square[:, :3]
    ),
}


@pytest.mark.parametrize("function", AS_IN_TORCH.values(), ids=AS_IN_TORCH)
def test_what_torch_refuses_fails_alike_on_all_ranks(function):
    check_error(function)
