"""Numbers by their rank among all rows: the largest, medians, quantiles, and the places of their rows."""

import pytest
import torch
import torch.nn.functional as F
from whole_and_split import NUM_RANKS, ODD, USUAL, cases, check, refusals, sample, trial_of

from domainpar.nn.adapt.across import Member


def shares():
    return torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64)


EXACT = {
    "the largest of each column": lambda x: (*x.topk(3, 0), *x.topk(2, dim=0, largest=False)),
    "the largest edges": lambda e: (*e.topk(5, 0), e.topk(1, 0).values.sum()),
    "the best nodes": lambda x, v: x[v.topk(3).indices],
    "the best edges and their ends": lambda e, x, src: x[src][e[:, 0].topk(4).indices],
    "along another dimension": lambda columns, series: (columns.topk(3, 1).values, series.median(1).values),
    "of features, each row by itself": lambda x: (*x.topk(2, 1), *x.kthvalue(2, 1), x.median(1).values),
    "the k-th": lambda x, v: (*x.kthvalue(4, 0), *x.kthvalue(1, dim=0, keepdim=True), v.kthvalue(13).values),
    "medians": lambda x, v: (*x.median(0), *x.median(0, keepdim=True), v.median(), x.median()),
    "medians of integers and bools": lambda batch, kind, mask: (
        batch.median(),
        kind.median(0).values,
        mask[4],
    ),
    "medians of single precision": (lambda x: (x.float().median(0).values, x.float().topk(2, 0).values), {}),
    "half precision": lambda x: (x.bfloat16().topk(2, 0).values, x.half().median(0).values),
    "quantiles": lambda x: (torch.quantile(x, 0.3, dim=0), torch.quantile(x, shares(), dim=0), x.quantile(shares())),
    "quantiles that stay": lambda x, series: (
        torch.quantile(x, shares(), dim=0, keepdim=True),
        torch.quantile(x, 0.3, 0, True),
        torch.quantile(x, 0.3, keepdim=True),
        torch.quantile(series, shares(), dim=1),
    ),
    "quantiles between": lambda v: tuple(
        torch.quantile(v, 0.4, interpolation=how) for how in ("linear", "lower", "higher", "nearest", "midpoint")
    ),
    "with infinite numbers": lambda x: (
        x.masked_fill(x > 1, torch.inf).topk(2, 0).values,
        x.masked_fill(x < 0, -torch.inf).median(0).values,
    ),
    "with nan": (
        lambda x, v: (v.log().median(), v.log().topk(2)[0], torch.quantile(x.log(), 0.5, 0), v.log().kthvalue(2)[0]),
        {"gradients": False},
    ),
    "ties of a median of all": lambda z: z.median(),
    "of selected and joined rows": lambda x, mask, e: (
        x[mask].median(0).values,
        *torch.cat([x, e]).topk(3, 0),
        torch.quantile(x[mask], 0.5, dim=0),
    ),
    "which is largest": lambda x, e: (x.argmax(0), x.argmin(0, keepdim=True), x.argmax(), e.argmin(), x.max(0).indices),
    "which of equal ones": lambda z, batch: (z.argmax(0), z.min(0).indices, z.argmin(), *batch.max(0)),
    "the row that has it": lambda x, v: (x[v.max(0).indices], x[v.argmin()], v[v.min(0)[1]]),
    "unpacked": lambda x: tuple(part for part in x.max(dim=0)),
    "normalised columns": lambda x, e: (
        F.normalize(x, dim=0),
        F.normalize(x, p=1, dim=0),
        F.normalize(e, p=3.0, dim=0, eps=1e-3),
        F.normalize(x, p=float("inf"), dim=0),
        F.normalize(x, dim=1),
    ),
    "normalised nothing": lambda x: F.normalize(x * 0, dim=0),
    "other norms": lambda x, e: (
        x.norm(p=1),
        x.norm(p=1, dim=0),
        e.norm(3, 0),
        torch.linalg.vector_norm(x, torch.inf, dim=0),
        torch.linalg.vector_norm(x, -torch.inf),
        (x * 0).norm(p=1.5, dim=0),
    ),
    "products": lambda x, u: (x.prod(0), u.prod(), x.prod(1), x.prod(0, keepdim=True)),
    "products with zeros": lambda x: (x * (x > 0)).prod(0),
    "products of integers": lambda batch: (batch + 1).prod(),
    "products of complex numbers": lambda x: torch.view_as_real((x * (1 + 1j)).prod(0)),
    "sums of integers without nan": lambda batch, kind: (batch.nansum(), kind.nansum(0)),
    "large halves": (
        lambda x: (
            F.normalize(x.half() * 200, dim=0),
            F.normalize(x.half() * 1e-4, dim=0),
            (x.half() * 100).norm(3, 0),
            (x.half() * 1000).mean(0),
            (x * 30000).bfloat16().sum(0),
        ),
        {"tolerance": 2e-2, "gradients": False},
    ),
    "norms of another type": (
        lambda x: (
            torch.linalg.vector_norm(x.float(), 3, dim=0, dtype=torch.float64),
            torch.linalg.vector_norm(x.float(), torch.inf, dim=0, dtype=torch.float64),
        ),
        {"gradients": False},
    ),
    "shares that are learned": lambda x, c: (
        torch.quantile(x, c.sigmoid(), dim=0),
        torch.quantile(x, c.sigmoid()[0], interpolation="midpoint"),
    ),
    "of constants": lambda v, batch, x, mask: (
        (v * 0).topk(2)[0],
        (batch * 0).topk(3)[0],
        torch.quantile(v * 0, shares()),
        (x[mask] * 0).topk(2, 0).values,
    ),
    "of one row": lambda v, x: (
        torch.quantile(x[v == v.max()], shares(), dim=0, interpolation="lower"),
        x[v == v.max()].topk(0, 0).values,
    ),
    "of no columns": lambda x: (x[:, :0].topk(3, 0).values, x[:, :0].median(0).values),
    "the largest of all, kept": lambda x, v: (x.argmax(keepdim=True), v.argmin(None, True)),
    "the least integers": lambda batch: (
        *batch.masked_fill(batch == 0, torch.iinfo(torch.int64).min).min(0),
        batch.masked_fill(batch == 0, torch.iinfo(torch.int64).min).argmin(),
        (batch * 0 + torch.iinfo(torch.int64).min).max(0).indices,
        batch.masked_fill(batch == 0, torch.iinfo(torch.int64).min).kthvalue(2),
    ),
    "negative zero": lambda v: (
        1 / (v.detach().abs() * -0.0).topk(1).values,
        1 / (v.detach().abs() * -0.0).median(0).values,
        1 / (v.detach().abs() * -0.0)[3],
    ),
    "without nan": lambda x: (torch.where(x > 0, x, torch.nan).nansum(0), torch.where(x > 0, x, torch.nan).nanmean()),
}  # fmt: skip

REFUSED = {
    "all of them sorted": (lambda x: x.sort(0), "topk, median and quantile over rows"),
    "their order": (lambda v: v.argsort(), "topk, median and quantile over rows"),
    "the commonest": (lambda batch: batch.mode(0), "no exact form"),
    "a row for each row": (lambda x, v: x[v.sort().indices], "no exact form"),
    "complex numbers": (lambda x: (x * 1j).norm(p=1), "norm of order 1"),
    "a share for each row": (lambda x, u: torch.quantile(x, u.sigmoid(), dim=0), "shares that differ from row to row"),
    "norms of negative order": (lambda x: torch.linalg.vector_norm(x, -2, dim=0), "norm of order -2"),
    "norms below 1": (lambda x: x.norm(p=0.5), "norm of order 0.5"),
    "rows written at a choice of rows": (lambda v: F.gumbel_softmax(v, dim=0, hard=True), "does not number them"),
}


@cases(EXACT)
def test_ranks_are_those_among_the_rows_of_the_whole_graph(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_what_would_need_all_rows_on_a_rank_is_refused(function, text, more):
    check(function, refused=text, **more)


def test_of_equal_numbers_the_first_row_counts_on_any_number_of_ranks():
    """torch leaves open which of them it takes, so one rank is held against several."""
    check(
        lambda z: (*z.topk(5, 0), *z.kthvalue(3, 0), *z.median(0), torch.quantile(z, shares(), dim=0)), against="alone"
    )
    found = trial_of(lambda z: z.topk(13, 0).indices, USUAL).split(NUM_RANKS).ranks[0].result
    z = USUAL.z
    for column, places in zip(z.T, found.T):
        assert places.tolist() == sorted(range(13), key=lambda row: (-column[row], row)), "NumPy's stable order"


@pytest.mark.parametrize("name", [name for name in ODD if "no edges" not in name and "without edges" not in name])
def test_they_do_not_mind_how_many_rows_a_rank_has(name):
    check(lambda x, e: (x.topk(1, 0).values, e.median(0).values, x.quantile(0.25, 0), e[:, 0].max(0)[0]), ODD[name])
    check(lambda x: (x.argmax(0), F.normalize(x, dim=0), x.prod(0)), ODD[name])


def test_a_column_that_no_range_of_numbers_is_too_wide_for():
    """From the most negative number to the largest: the middle of two keys is found without overflow."""
    most = torch.finfo(torch.float64).max
    numbers = torch.tensor([-most, most, 0.0, -0.0, 5e-324, -5e-324, torch.inf, -torch.inf, 1.0, -1.0, 2.0, 3.0, 4.0])
    graph = sample()
    graph = type(graph)(**{**vars(graph), "v": numbers.double()})
    found = trial_of(lambda v: torch.stack([v.kthvalue(k).values for k in range(1, 14)]), graph).split(NUM_RANKS)
    assert found.failure is None, found.failure
    result = found.ranks[0].result
    assert torch.equal(result, numbers.double().sort().values)


def test_too_many_and_none_are_refused_on_all_ranks_alike():
    too_many = (lambda v: v.topk(14), lambda v: v.kthvalue(14), lambda v: v.quantile(1.5))

    def of_no_rows(name):
        return lambda v: getattr(torch, name)(v[v > 100], 0)

    of_none = map(of_no_rows, ("argmax", "amax", "median", "max"))
    for function in (*too_many, *of_none, lambda v: torch.linalg.vector_norm(v[v > 100], -torch.inf)):
        run = trial_of(function, USUAL).split(NUM_RANKS)
        assert len(run.failures) == NUM_RANKS
        assert all(isinstance(failure.error, ValueError) for failure in run.failures)


def test_what_ranks_exchange_does_not_grow_with_the_rows(monkeypatch):
    """Not the numbers, but counts of them: a few for each column."""
    sizes = []
    gather = Member.gather
    monkeypatch.setattr(Member, "gather", lambda self, local: sizes.append(local.numel()) or gather(self, local))
    trial = trial_of(lambda x: (x.median(0).values, x.topk(2, 0).values), sample(200, 3))
    assert trial.split(NUM_RANKS).failure is None
    assert 0 < max(sizes) <= 2 * 4 * 2, "of two ranks of four columns, or two ends of each"
