"""Calls that are said in other torch calls: alike, exact or refused."""

import pytest
import torch
import torch.nn.functional as F
from whole_and_split import ODD, cases, check, refusals


def alike(function, **more):
    return function, {"against": "alone"} | more


EXACT = {
    "features side by side": lambda x, z: torch.hstack([x, z]),
    "rows behind rows": lambda x, z, v, u: torch.vstack([x, z]).sum(0) + torch.hstack([v, u]).sum(),
    "rows on top": lambda v, u, src: torch.vstack([v, u])[:, src],
    "ends on top": lambda src, dst, x: (lambda ends: x[ends[0]] - x[ends[1]])(torch.vstack([src, dst])),
    "self-loops on top": lambda x: x[torch.vstack([torch.arange(x.size(0)), torch.arange(x.size(0))])[0]],
    "numbers of the type of rows": lambda x, mask: (
        x * x.new_tensor([1, 2, x.size(0), 3]) + mask.new_tensor(data=2.0, dtype=x.dtype) * x.new_tensor(x.size(0))
    ),
    "a random choice": alike(
        lambda x, series, src: F.gumbel_softmax(x)[src] * F.gumbel_softmax(series, 0.5, dim=0).sum((0, 2))[src][:, None]
    ),
    "a random hard choice": alike(lambda x, src: F.gumbel_softmax(x, hard=True, dim=1)[src] * x[src]),
    "a random choice of every rank": alike(lambda x, c: x * F.gumbel_softmax(c, dim=0)),
}

REFUSED = {
    "a constant behind rows": (lambda x, c: torch.vstack([x, c]), "virtual node"),
    "a constant of all rows beside rows": (
        lambda x: torch.hstack([x, torch.ones(13, 1, dtype=x.dtype)]),
        "beside rows",
    ),
    "nodes beside edges": (
        lambda x, e: torch.hstack([x, e]),
        "not the same rows",
        {"sample": ODD["as many edges as nodes"]},
    ),
    "rows along a third dimension": (lambda vectors: torch.hstack([vectors[..., 0], vectors[..., 0].t()]), ""),
    "rows made anew": (lambda x: x.new_tensor(x.detach()), "torch.tensor is given rows"),
    "put by a mask": (lambda x, mask, z: x.index_put((mask,), z[mask]), "x[index] = values, or index_add"),
    "a column beside columns": (lambda x, v: torch.column_stack([x, v]), "use torch.cat or torch.stack"),
    "a list of entries": (lambda x: x.masked_select(x > 0), "x[mask]"),
}


@cases(EXACT)
def test_the_same_in_other_calls_is_exact(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_what_has_no_exact_form_in_other_calls_has_none(function, text, more):
    check(function, refused=text, **more)


@pytest.mark.parametrize("name", ODD)
def test_synonyms_do_not_mind_lengths(name):
    check(lambda x, z, v, u: (torch.hstack([x, z]), torch.vstack([v, u])), ODD[name])
