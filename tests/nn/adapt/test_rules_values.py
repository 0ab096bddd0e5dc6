"""Sizes and values that Python asks for: of the whole graph, or refused."""

import math

import numpy as np
import torch
from whole_and_split import ODD, cases, check, refusals

EXACT = {
    "a size makes tensors of as many rows": lambda x: x + x.new_ones(x.size(0), 1),
    "a shape compares as the whole graph's": lambda x, z, e: x * 2 if x.shape == z.shape and x.size(0) == 13 else x,
    "sizes of other dimensions are plain": lambda x: x / x.size(1) + x.size(-1),
    "a size from behind": lambda series: series.view(2, series.size(-2), 3),
    "a comparison of sizes": lambda x, e: x * 2 if x.size(0) < e.size(0) and e.size(0) >= 40 else x,
    "the number of edges is not that of nodes": lambda x, e: x if x.size(0) == e.size(0) else x * 3,
    "no numbers at all": (lambda e: e * 2 if e.numel() == 0 else e, {"sample": ODD["no edges"]}),
    "some numbers": lambda e: e * 2 if e.numel() == 0 else e * 3,
    "a sum over all rows as a number": lambda x: x * float(x.detach().sum()) + x.mean().item(),
    "a decision by all rows": lambda x: x * 2 if (x > 0).any() and not bool((x > 0).all()) else x,
    "len of rows": lambda x, series: (x * len(x), x.sum(0) / len(x), series * len(series)),
    "numbers of rows times one, plus zero": lambda x: x.view(0 + 1 * x.size(0) // 1 - 0, 2, -1),
    "len of what every rank has": lambda x, table: x * len(table),
}

REFUSED = {
    "memory": (lambda x: x.untyped_storage(), "disable=True"),
    "len of rows as a size": (lambda x: x + torch.ones(len(x), 1), "same on every rank, beside rows"),
    "a cache by a number of rows": (lambda x: x * len({x.size(0): 1}), "looked up"),
    "an item of rows": (lambda v: v * v.item(), "Python asks for values"),
    "a list of values": (lambda x: x.tolist(), "Python asks for values"),
    "numpy": (lambda x: x.detach().numpy(), "Python asks for values"),
    "numpy by itself": (lambda x: np.asarray(x.detach()), "Python asks for values"),
    "whether rows are true": (lambda v: v if v > 0 else v * 2, "Python asks for values"),
    "a decision by one rank's rows": (lambda mask, x: x if mask else x * 2, "Python asks for values"),
    "whether two are close": (lambda x, z: x * float(torch.allclose(x, z)), "Python asks for values"),
    "whether two are equal": (lambda x, z: x * float(torch.equal(x, z)), "Python asks for values"),
    "row by row": (lambda x: sum(row.sum() for row in x), "one by one"),
    "whether a value is among rows": (lambda v: v if 0.5 in v else v * 2, "Python asks for values"),
}

LAW = {
    "rows divided by their number": lambda x: x / x.size(0),
    "rows times their number": lambda x: x * x.size(0),
    "a sum divided by a number of rows": lambda x: x.sum(0) / x.size(0),
    "a sum divided by int of a number of rows": lambda x: x.sum(0) / int(x.size(0)),
    "a sum divided by float of a number of rows": lambda x: x.sum(0) / float(x.size(0)),
    "the logarithm of a number of rows": lambda x: x.sum(0) * math.log(x.size(0)),
    "the root of a number of edges": lambda e: e.sum(0) * math.sqrt(e.size(0)),
    "a loop over a number of rows": lambda x: x * sum(1 for _ in range(x.size(0))),
    "a number of rows in a set": lambda x: x * 2 if x.size(0) in {13, 14} else x,
    "a number of rows as a key": lambda x: x * {13: 2.0}.get(x.size(0), 1.0),
    "half the number of rows": lambda x: x * (x.size(0) // 2),
    "features up to a number of rows": lambda square: square[:, : square.size(0)].sum(1),
    "a power by a number of rows": lambda u, x: (u + 1).pow(x.size(0)),
    "clamped by a number of rows": lambda x: (x * 20).clamp(max=x.size(0)),
    "filled where a mask is set": lambda x, mask: x.masked_fill(mask.view(-1, 1), x.size(0)),
    "a number of selected rows": lambda x, mask: x[mask].sum(0) / x[mask].size(0),
    "a number of numbers": lambda x: x * 2 if x.numel() > 20 else x * 3,
    "a mean by the number of numbers": lambda x: x.sum() / x.numel(),
    "a number of rows printed": lambda x: x * len(f"{x.size(0):d}"),
}


@cases(EXACT)
def test_what_python_is_told_is_of_the_whole_graph(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_values_of_one_rank_are_not_told(function, text, more):
    check(function, refused=text, **more)


WAITING = {}


@cases(LAW, WAITING)
def test_a_number_of_rows_is_the_whole_graphs_or_refused(function, more):
    check(function, or_refused=True, **more)
