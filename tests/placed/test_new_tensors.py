"""Tensors of as many rows as others have, and what Python is told of sizes and values."""

import numpy as np
import torch
from whole_and_split import ODD, cases, check, refusals

EXACT = {
    "zeros, ones and full": lambda x: (
        torch.zeros(x.size(0), 4) + torch.ones((x.size(0), 1)) + x + torch.full((x.shape[0],), 2.0)[:, None]
    ),
    "rows along another dimension": lambda series: series * series.new_ones(2, series.size(1), 1),
    "of a whole shape": lambda x, src: (x.new_full(x.shape, 3.0) * x)[src],
    "like others": lambda x, src: (
        (torch.ones_like(x) + x)[src] + torch.full_like(x, 2.0)[src] + torch.zeros_like(x)[src]
    ),
    "made of rows' type, but not of them": lambda x: x.new_ones(4) * x + x.new_zeros(1, 4),
    "self-loops": lambda x, edge_index: (lambda both: x.new_zeros(x.size(0), 4).index_add(0, both[1], x[both[0]]))(
        torch.cat([edge_index, torch.arange(x.size(0)).view(1, -1).repeat(2, 1)], 1)
    ),
    "a number of rows as a tensor": lambda x, e: x.sum(0) / torch.tensor(x.size(0)) + torch.as_tensor(e.size(0)),
    "no edges": (
        lambda x, e, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, e + e.new_ones(e.size(0), 1)),
        {"sample": ODD["no edges"]},
    ),
    "numbers computed with": lambda x: torch.arange(x.size(0)) * 2,
    "every row with every other one": lambda x: x.new_zeros(x.size(0), x.size(0)),
    "a unit matrix": lambda x: torch.eye(x.size(0)),
    "an even division": lambda x: torch.linspace(0, 1, x.size(0)),
    "full of a number of rows": lambda x: torch.full((2,), x.size(0), dtype=x.dtype),
    "full of a number of rows, by a keyword": lambda x: torch.full(size=(2,), fill_value=x.size(0), dtype=x.dtype),
    "rows full of their number": lambda x: torch.full((x.size(0), 2), x.size(0), dtype=x.dtype),
    "like rows, full of their number": lambda x: torch.full_like(x, x.size(0)),
    "like a constant, full of a number of rows": lambda x, c: torch.full_like(c, x.size(0)),
    "numbers of all nodes at the ends of edges": lambda x, src: x[torch.arange(x.size(0))[src]],
    "as long as there are edges, of nodes": (
        lambda x, e: x + x.new_ones(e.size(0), 1),
        {"sample": ODD["one node without edges"]},
    ),
    "a size makes tensors of as many rows": lambda x: x + x.new_ones(x.size(0), 1),
    "a shape compares as the whole graph's": lambda x, z, e: x * 2 if x.shape == z.shape and x.size(0) == 13 else x,
    "a size from behind": lambda series: series.view(2, series.size(-2), 3),
    "no numbers at all": (lambda e: e * 2 if e.numel() == 0 else e, {"sample": ODD["no edges"]}),
    "a sum over all rows as a number": lambda x: x * float(x.detach().sum()) + x.mean().item(),
    "a decision by all rows": lambda x: x * 2 if (x > 0).any() and not bool((x > 0).all()) else x,
    "whether two are close": lambda x, z: x * float(torch.allclose(x, z)),
    "whether two are equal": lambda x, z: x * float(torch.equal(x, z)),
    "row by row": lambda x: sum(row.sum() for row in x),
    "whether a value is among rows": lambda v: v if 0.5 in v else v * 2,
    "a sum divided by float of a number of rows": lambda x: x.sum(0) / float(x.size(0)),
    "clamped by a number of rows": lambda x: (x * 20).clamp(max=x.size(0)),
    "filled where a mask is set": lambda x, mask: x.masked_fill(mask.view(-1, 1), x.size(0)),
}
REFUSED = {
    "a list of values": (lambda x: x.tolist(), "part.whole(tensor)"),
    "numpy": (lambda x: x.detach().numpy(), "part.whole(tensor)"),
    "numpy by itself": (lambda x: np.asarray(x.detach()), "part.whole(tensor)"),
}


@cases(EXACT)
def test_sizes_and_values_are_the_whole_graphs(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_values_of_rows_are_not_told(function, text, more):
    check(function, refused=text, **more)
