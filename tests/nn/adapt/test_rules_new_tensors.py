"""Tensors of as many rows as others have."""

import torch
from whole_and_split import ODD, cases, check, refusals

EXACT = {
    "zeros, ones and full": lambda x: (
        torch.zeros(x.size(0), 4) + torch.ones((x.size(0), 1)) + x + torch.full((x.shape[0],), 2.0)[:, None]
    ),
    "zeros by a keyword": lambda x: torch.ones(size=(x.size(0), 4), dtype=x.dtype) * x,
    "rows along another dimension": lambda series: series * series.new_ones(2, series.size(1), 1),
    "of a whole shape": lambda x, src: (x.new_full(x.shape, 3.0) * x)[src],
    "of edges": lambda e, dst, x: x.new_zeros(x.size(0)).index_add(0, dst, e.new_ones(e.size(0))),
    "like others": lambda x, src: (
        (torch.ones_like(x) + x)[src] + torch.full_like(x, 2.0)[src] + torch.zeros_like(x)[src]
    ),
    "of a selection": lambda x, mask: x[mask] + torch.ones(x[mask].size(0), 4),
    "made of rows' type, but not of them": lambda x: x.new_ones(4) * x + x.new_zeros(1, 4),
    "numbers of all nodes": lambda x: x[torch.arange(x.size(0))],
    "self-loops": lambda x, edge_index: (lambda both: x.new_zeros(x.size(0), 4).index_add(0, both[1], x[both[0]]))(
        torch.cat([edge_index, torch.arange(x.size(0)).view(1, -1).repeat(2, 1)], 1)
    ),
    "a number of rows as a tensor": lambda x, e: x.sum(0) / torch.tensor(x.size(0)) + torch.as_tensor(e.size(0)),
    "no edges": (
        lambda x, e, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, e + e.new_ones(e.size(0), 1)),
        {"sample": ODD["no edges"]},
    ),
    "numbers computed with": lambda x: torch.arange(x.size(0)) * 2,
}

REFUSED = {
    "every row with every other one": (lambda x: x.new_zeros(x.size(0), x.size(0)), "every row with every other"),
    "every node with every edge": (lambda x, e: x.new_zeros(x.size(0), e.size(0)), "every row with every other"),
    "numbers from one on": (lambda x: x * torch.arange(1, x.size(0))[0], "arange"),
    "numbers in steps": (lambda x: torch.arange(0, x.size(0), 2) * x.sum(), "arange"),
    "a constant of all rows as it is": (lambda x: x + torch.ones(13, 1), "same on every rank, beside rows"),
}

LAW = {
    "a number of rows in a list": lambda x: torch.tensor([x.size(0), 1]) * x.sum(),
    "a unit matrix": lambda x: torch.eye(x.size(0)),
    "an even division": lambda x: torch.linspace(0, 1, x.size(0)),
    "full of a number of rows": lambda x: torch.full((2,), x.size(0), dtype=x.dtype),
    "full of a number of rows, by a keyword": lambda x: torch.full(size=(2,), fill_value=x.size(0), dtype=x.dtype),
    "rows full of their number": lambda x: torch.full((x.size(0), 2), x.size(0), dtype=x.dtype),
    "like rows, full of their number": lambda x: torch.full_like(x, x.size(0)),
    "like a constant, full of a number of rows": lambda x, c: torch.full_like(c, x.size(0)),
    "numbers by a keyword": lambda x: x[torch.arange(end=x.size(0))],
    "numbers as floats": lambda x: torch.arange(x.size(0), dtype=x.dtype)[:, None] + x,
    "numbers of all nodes at the ends of edges": lambda x, src: x[torch.arange(x.size(0))[src]],
    "numbers of all nodes where edges end": lambda x, dst: x[torch.arange(x.size(0))[dst]],
    "as long as there are edges, of nodes": (
        lambda x, e: x + x.new_ones(e.size(0), 1),
        {"sample": ODD["one node without edges"]},
    ),
}
WAITING = {}


@cases(EXACT)
def test_made_tensors_have_the_rows_they_were_made_for(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_what_has_no_share_on_a_rank_is_not_made(function, text, more):
    check(function, refused=text, **more)


@cases(LAW, WAITING)
def test_made_tensors_are_exact_or_refused(function, more):
    check(function, or_refused=True, **more)
