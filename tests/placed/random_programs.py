"""Random programs of torch calls, run whole and split: a program is a seed, its statements are drawn one by one.

Statements pick their operands from what the program has made so far, whatever it is. One that torch refuses on the
whole graph, or that is refused anywhere on ranks, is left out, and the program is run again without it; what is left
has to be exact.

After a change of the rules: `PYTHONPATH=.:tests .venv/bin/python tests/placed/random_programs.py 0 2000` runs so many,
each on 1, 2 and 3 ranks, some minutes a thousand, and names those that are wrong.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from proving import check_no_rank_holds_all
from torch import Tensor
from whole_and_split import USUAL, Left, Sample, WholeGraph, calling, difference, run_one, runs_of

from domainpar import NotExact

STATEMENTS = 14

Env = list[Tensor]
Statement = Callable[["Draw", Env], Any]


class Draw:
    """What one statement draws: the same on every run of the program."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def of(self, given: Sequence[Any]) -> Any:
        return given[self._random.randrange(len(given))]

    def tensor(self, env: Env, *, floats: bool = False) -> Tensor:
        """One of the tensors, the later ones more often; places, not properties, so that all runs draw alike."""
        tries = [env[max(self._random.randrange(len(env)), self._random.randrange(len(env)))] for _ in range(3)]
        return next((one for one in tries if one.is_floating_point()), tries[0]) if floats else tries[0]


def _unary(draw: Draw, env: Env) -> Any:
    x = draw.tensor(env, floats=True)
    return draw.of(
        [
            lambda: x.sigmoid(),
            lambda: F.relu(x),
            lambda: torch.neg(input=x),
            lambda: x.abs() + 0.5,
            lambda: x.detach(),
            lambda: x.clone(),
            lambda: x.data,
            lambda: x > 0,
            lambda: x.round().long(),
            lambda: F.leaky_relu(x, negative_slope=draw.of([0.0, -0.0, 0.1])),
            lambda: torch.clamp(x, min=draw.of([-1, 0.0]), max=1),
        ]
    )()


def _binary(draw: Draw, env: Env) -> Any:
    x, y = draw.tensor(env), draw.tensor(env)
    return draw.of(
        [
            lambda: x + y,
            lambda: torch.sub(x, other=y),
            lambda: x * y,
            lambda: torch.maximum(x, y),
            lambda: torch.where(x > 0, x, y),
            lambda: x.where(y > 0, y),
            lambda: torch.atan2(x, y),
            lambda: x == y,
            lambda: torch.lerp(x, y, 0.25),
        ]
    )()


def _in_place(draw: Draw, env: Env) -> None:
    x, y = draw.tensor(env), draw.tensor(env)
    draw.of(
        [
            lambda: x.add_(1),
            lambda: x.mul_(y),
            lambda: x.add_(y),
            lambda: x.copy_(y),
            lambda: x.zero_(),
            lambda: x.fill_(draw.of([0.0, -0.0, 2])),
            lambda: F.relu(x, inplace=True),
            lambda: x.__setitem__(x > 0.5, 0),
            lambda: x[..., :1].mul_(2),
            lambda: torch.relu_(x),
            lambda: x.masked_fill_(x < 0, 0.25),
            lambda: x.clamp_(min=0),
        ]
    )()


def _made(draw: Draw, env: Env) -> Any:
    x = draw.tensor(env)
    value = draw.of([0.0, -0.0, 1, 1.0, True])
    return draw.of(
        [
            lambda: torch.full_like(x, value, dtype=torch.float64),
            lambda: x.new_zeros(x.size(0)),
            lambda: torch.zeros(x.size(0), 4),
            lambda: torch.ones(x.shape[0], dtype=torch.float64),
            lambda: x.new_full((x.size(0),), value),
            lambda: torch.zeros_like(x),
            lambda: torch.arange(x.size(0)),
            lambda: torch.as_tensor(value),
            lambda: 1 / torch.full_like(x, value, dtype=torch.float64),
        ]
    )()


def _chance(draw: Draw, env: Env) -> Any:
    x = draw.tensor(env, floats=True)
    return draw.of(
        [
            lambda: F.dropout(x, 0.5),
            lambda: F.dropout(x, p=0.5, training=True),
            lambda: F.dropout(x, 0.5, training=False),
            lambda: torch.dropout(x, 0.5, train=False),
            lambda: torch.rand_like(x),
            lambda: torch.rand(x.size(0)) > 0.4,
            lambda: torch.rand(x.size(0), 2),
            lambda: x[torch.rand(x.size(0)) > 0.4].sum(0),
        ]
    )()


def _ends(draw: Draw, env: Env) -> Any:
    x, src, dst = draw.tensor(env), *env[0].unbind(0)
    end = draw.of([src, dst])
    return draw.of(
        [
            lambda: x[end],
            lambda: x.index_select(0, end),
            lambda: x[src] - x[dst],
            lambda: x[env[0]],
            lambda: x[end, 0],
            lambda: src == dst,
            lambda: env[0][:, draw.tensor(env)],
            lambda: x.gather(0, end.view(-1, 1).expand(-1, x.size(1))),
        ]
    )()


def _sums(draw: Draw, env: Env) -> Any:
    v, src, dst = draw.tensor(env), *env[0].unbind(0)
    n, end = env[1].size(0), draw.of([dst, dst, src])
    wide = end.view(-1, 1).expand_as(v) if v.dim() == 2 else end
    return draw.of(
        [
            lambda: v.new_zeros(n, *v.shape[1:]).index_add(0, end, v),
            lambda: v.new_zeros(n, *v.shape[1:]).index_add_(0, end, v, alpha=2),
            lambda: v.new_zeros(n, *v.shape[1:]).scatter_add(0, wide, v),
            lambda: v.new_zeros(n, *v.shape[1:]).scatter_reduce(0, wide, v, "amax", include_self=False),
            lambda: v.new_zeros(n, *v.shape[1:]).scatter_reduce(0, wide, v, reduce="mean"),
            lambda: v.new_zeros(n).index_add(0, end, v.new_ones(v.size(0))),
            lambda: v.new_ones(3, *v.shape[1:]).index_add(0, env[2], v),
            lambda: draw.tensor(env).index_add_(0, end, v),
        ]
    )()


def _reduced(draw: Draw, env: Env) -> Any:
    x, dim = draw.tensor(env), draw.of([0, 0, 1, -1])
    return draw.of(
        [
            lambda: x.sum(dim),
            lambda: x.mean(axis=dim, keepdims=True),
            lambda: torch.sum(input=x, dim=dim, keepdim=True),
            lambda: x.amax(dim),
            lambda: x.max(dim).values,
            lambda: x.std(dim, unbiased=draw.of([True, False])),
            lambda: x.mean(),
            lambda: x.norm(dim=dim),
            lambda: torch.softmax(x, dim),
            lambda: F.softmax(x, dim=dim, dtype=torch.float64),
            lambda: (x > 0).any(axis=dim),
            lambda: x.unique(),
            lambda: F.mse_loss(x, x * 0.5, size_average=draw.of([True, False])),
            lambda: F.mse_loss(x, x * 0.5, None, None, draw.of(["sum", "mean", "none"])),
            lambda: x.size(0) * torch.ones(2),
        ]
    )()


def _shaped(draw: Draw, env: Env) -> Any:
    x, y, dim = draw.tensor(env), draw.tensor(env), draw.of([0, 1, -1])
    return draw.of(
        [
            lambda: x.t(),
            lambda: x.unsqueeze(dim),
            lambda: x.squeeze(dim),
            lambda: x.view(x.size(0), -1),
            lambda: x.reshape(-1, 2),
            lambda: x[:, 0],
            lambda: x[:, 1:],
            lambda: x[..., None],
            lambda: torch.cat([x, y], dim),
            lambda: torch.stack([x, y], axis=dim),
            lambda: x.chunk(2, dim)[0],
            lambda: x.expand(2, *x.shape)[1],
            lambda: x.flip(dim),
            lambda: x[x > 0] if x.dim() == 1 else x[x[:, 0] > 0],
            lambda: x @ y.t() if x.dim() == 2 and y.dim() == 2 else x,
            lambda: x.T @ y,
            lambda: x.repeat(1, 2),
            lambda: x[draw.of([0, -1, 2])],
            lambda: x[draw.of([slice(3), slice(1, None), slice(None, None, 2)])],
        ]
    )()


KINDS: tuple[Statement, ...] = (
    _unary,
    _binary,
    _in_place,
    _made,
    _chance,
    _ends,
    _sums,
    _reduced,
    _shaped,
)
WEIGHTS = (5, 6, 5, 4, 3, 6, 5, 5, 6)


class Stopped(Exception):
    """A statement could not be run."""

    def __init__(self, number: int, why: BaseException) -> None:
        super().__init__(f"statement {number}: {type(why).__name__}: {why}")
        self.number = number


class Refused(Stopped, NotExact):
    """A statement was refused on a split graph."""


@dataclass
class Program:
    """A random program.

    Attributes:
        seed: What it is drawn from.
        left_out: Numbers of the statements that are not run.
    """

    seed: int
    left_out: set[int] = field(default_factory=set)

    def function(self) -> Callable[..., Any]:
        """The program as a function of a sample's fields, as `whole_and_split` runs them."""

        def run(edge_index: Any, x: Any, kind: Any, e: Any, v: Any, z: Any, mask: Any, c: Any) -> Any:
            env = [edge_index.clone(), x * 1, kind.clone(), e * 1, v * 1, z * 1, mask.clone(), c * 1]
            first = len(env)
            for number in range(STATEMENTS):
                if number not in self.left_out:
                    self._run_one(number, env)
            return tuple(one for one in env[first:] if one.dim() > 0 or one.dtype is not torch.bool)

        return run

    def _run_one(self, number: int, env: Env) -> None:
        draw = Draw(f"{self.seed} {number}")
        kind = draw._random.choices(KINDS, WEIGHTS)[0]
        try:
            made = kind(draw, env)
        except NotExact as refused:
            raise Refused(number, refused) from refused
        except Exception as error:
            raise Stopped(number, error) from error
        if isinstance(made, Tensor):
            env.append(made)

    def last_of(self, *wanted: Statement) -> int:
        """The last statement of some kinds, or else the last one."""
        those = [at for at, kind in enumerate(self.kinds()) if kind in wanted and at not in self.left_out]
        return (those or sorted(set(range(STATEMENTS)) - self.left_out))[-1]

    def kinds(self) -> list[Statement]:
        """The kind of each statement."""
        return [Draw(f"{self.seed} {at}")._random.choices(KINDS, WEIGHTS)[0] for at in range(STATEMENTS)]

    @property
    def by_chance(self) -> bool:
        """Whether it draws random numbers, of which torch alone draws others."""
        return any(kind is _chance and at not in self.left_out for at, kind in enumerate(self.kinds()))

    def whole(self) -> Left:
        """The run on the whole graph."""
        torch.manual_seed(0)
        call, leaves = calling(self.function(), USUAL)
        return run_one(WholeGraph(USUAL.edge_index), call, None, leaves, True)

    def on(self, num_ranks: int) -> list[Left]:
        """The runs on some ranks."""
        graph = dealt(USUAL, num_ranks)
        call, leaves = calling(self.function(), graph)
        against = {"against": "alone"} if num_ranks == 1 else {"against": ""}
        given = (call, graph.edge_index, graph.assignment)
        return runs_of(*given, leaves=leaves, ranks=(num_ranks,), **against).ranks[num_ranks]

    def __str__(self) -> str:
        left = [f"{at} {kind.__name__}" for at, kind in enumerate(self.kinds()) if at not in self.left_out]
        return f"program {self.seed}, statements {', '.join(left)}"


def dealt(sample: Sample, num_ranks: int) -> Sample:
    """A sample whose nodes are dealt to so many parts."""
    return replace(sample, assignment=tuple(part % num_ranks for part in sample.assignment))


def number_of(refused: NotExact, program: Program) -> int:
    """The statement that was refused; of a refusal in backward the last one, one after the other."""
    return refused.number if isinstance(refused, Refused) else program.last_of()


def settled(program: Program) -> Left:
    """Leave out what torch refuses on the whole graph, or one rank; the run that others are compared with.

    Raises:
        AssertionError: If one rank has another result than the whole graph.
    """
    for _ in range(2 * STATEMENTS):
        try:
            whole = program.whole()
        except Stopped as stop:
            program.left_out.add(stop.number)
            continue
        except RuntimeError:  # backward: a value was changed in place after it was used
            program.left_out.add(program.last_of(_in_place))
            continue
        try:
            (alone,) = program.on(1)
        except Stopped as stop:
            if not program.by_chance:  # which makes other numbers, and so other shapes
                raise AssertionError(f"{program} on one rank: {stop}") from stop
            program.left_out.add(stop.number)
            continue
        if alone.refused is not None:
            program.left_out.add(number_of(alone.refused, program))
            continue
        if program.by_chance:
            return alone
        compare(f"{program} on one rank", alone, whole)
        return whole
    raise AssertionError(f"{program}: nothing is left of it")


def compare(where: str, ours: Left, theirs: Left) -> None:
    """One run has left what another one has."""
    off, what = difference(ours, theirs)
    assert off <= 1e-9, f"{where}: {what} differs by {off:.1e}"


@dataclass
class Tally:
    """Programs that were split: how many were exact, and how many statements the split was refused for."""

    exact: int = 0
    statements: int = 0
    refused: int = 0


def run_split(program: Program, num_ranks: int, tally: Tally) -> None:
    """Run a program, with what `settled` left out of it, on several ranks and compare.

    Statements that are refused there only are left out as well, and the program is run again.

    Raises:
        AssertionError: If a program is not exact, ends in an error that is no refusal, or ranks disagree.
    """
    program, graph = replace(program, left_out=set(program.left_out)), dealt(USUAL, num_ranks)
    check_no_rank_holds_all(graph.edge_index, graph.assignment, num_ranks, "incoming")
    for _ in range(STATEMENTS):
        where = f"{program} on {num_ranks} ranks"
        expected = settled(program)
        found = program.on(num_ranks)
        numbers = {number_of(left.refused, program) for left in found if left.refused is not None}
        assert len(numbers) <= 1, f"{where}: ranks refuse statements {numbers}"
        if not numbers:
            for left in found:
                compare(where, left, expected)
            tally.exact += 1
            tally.statements += STATEMENTS - len(program.left_out)
            return
        tally.refused += 1
        program.left_out |= numbers
    raise AssertionError(f"{program}: nothing is left of it")


def check_programs(seeds: Iterable[int]) -> Tally:
    """Run each program on one rank, and on two or on three, in double precision.

    Single precision would turn rounding into other masks.

    Raises:
        AssertionError: If one is not exact, as `settled` and `run_split` say.
    """
    before, tally = torch.get_default_dtype(), Tally()
    torch.set_default_dtype(torch.float64)
    try:
        for seed in seeds:
            program = Program(seed)
            settled(program)
            run_split(program, 2 + seed % 2, tally)
    finally:
        torch.set_default_dtype(before)
    return tally


def main(first: int, last: int) -> int:
    """Run the programs of some seeds on one to three ranks; 1 if one is wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    tally, wrong = Tally(), 0
    for seed in range(first, last):
        program = Program(seed)
        try:
            settled(program)
            for num_ranks in (2, 3):
                run_split(program, num_ranks, tally)
        except Exception as error:
            wrong += 1
            print(f"{seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{wrong} of {last - first} programs are wrong; {tally}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
