"""The watch over a forward pass: every torch call goes through a rule that keeps it exact, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from domainpar.nn.adapt.calls import DRAWS, DROPS, TAKES_SIZES, TELLS_NO_VALUE, USUAL, Call, Signature, name_of
from domainpar.nn.adapt.nested import flat, tensors_in
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.recomputation import Recomputation
from domainpar.nn.adapt.rows import APART, UNKNOWN, Axis, CachedResult, NotExact, RowCount, Rows, mark, rows_of
from domainpar.nn.adapt.transforms import run_as_written
from domainpar.nn.adapt.value_numbers import ValueNumbers
from domainpar.nn.adapt.versions import Versions

Rule = Callable[["Watch", "Call"], Any]
RULES: dict[str, Rule] = {}
_SIGNATURES: dict[str, Signature] = {}
_KNOW_NUMBERS: set[str] = set()


def rule(*names: str, takes: str = "", knows_numbers: bool = False) -> Callable[[Rule], Rule]:
    """Make a function the rule of the torch calls of some names, without underscores at the ends.

    Args:
        names: The calls.
        takes: Their arguments, see `Signature`.
        knows_numbers: Whether the rule tells row numbers from other integers. All other rules get them as values like
            any other: the row numbers of the whole graph.
    """

    def register(result: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = result
            _SIGNATURES[name] = Signature(takes) if takes else USUAL
        _KNOW_NUMBERS.update(names if knows_numbers else ())
        return result

    return register


class Watch(TorchFunctionMode):
    """Watches the torch calls of one forward pass on one part.

    Args:
        part: The part that all tensors belong to.
        constants: Tensors of the model that are the same on every rank, by their `id`.
        noise: Gives the key of the n-th use of random numbers; None: random numbers are refused.
        recomputation: Records what backward is to compute again.

    Attributes:
        uses: How often random numbers were used.
    """

    def __init__(
        self,
        part: GraphPart,
        constants: Mapping[int, Tensor],
        noise: Callable[[int], int] | None = None,
        recomputation: Recomputation | None = None,
    ) -> None:
        super().__init__()
        self.part, self.noise, self.recomputation = part, noise, recomputation or Recomputation()
        self._phase, self._apart, self.uses = "nodes", False, 0
        self.alone = part.num_parts == 1
        self._constants = constants
        self.numbering = ValueNumbers()
        self.versions = Versions(constants, None if self.alone else part.node_axis)
        self.selected: dict[int, Axis] = {}
        self.slices: dict[tuple[int, int, int, int], tuple[Axis, Tensor]] = {}
        self._filled: dict[int, Tensor] = {}

    def __enter__(self) -> Watch:
        self._as_written = run_as_written(watching)
        self._as_written.__enter__()
        try:
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._as_written.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._as_written.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, in_place = name_of(func)
        kwargs = kwargs or {}
        if name in TELLS_NO_VALUE:
            return func(*args, **kwargs)
        call = Call(func, name, list(args), kwargs, in_place, _SIGNATURES.get(name, USUAL))
        arguments = tensors_in((args, kwargs))
        self.versions.check(arguments)
        result = self._under_rule(call) if self._concerns_rows(call) else self._replicated(call)
        self.versions.seen(arguments)
        self.versions.seen(tensors_in(result))
        return result

    def _under_rule(self, call: Call) -> Any:
        call = call.with_first()
        name, args, kwargs = call.name, call.args, call.kwargs
        if name not in _KNOW_NUMBERS:
            call = self.with_values(call)
        if kwargs.get("out") is not None:
            raise NotExact(f"torch.{name} writes into a given tensor (out=); use the one it returns.")
        if self._at_nodes_again(call):
            self._phase = "nodes"
            self.recomputation.iterate()
        if (handle := RULES.get(name)) is None:
            axes = sorted({rows.axis.name for tensor in call.tensors if (rows := self.rows(tensor))})
            raise NotExact(
                f"torch.{name} on {' and '.join(axes) or 'a number of rows'} has no exact form on a split graph that "
                "is known here; say the same in other torch functions, or tell us of it."
            )
        # Chance makes two values of equal calls, so it gives no number.
        by_chance = name in DRAWS or name in DROPS
        number = None if self.alone or by_chance else self.numbering.of_call(call.func, args, kwargs)
        result = handle(self, call)
        if number is not None:
            self.numbering.give(tensors_in(args[:1] if call.in_place else result), number)
        return result

    # What is known of a tensor

    def rows(self, tensor: Tensor) -> Rows | None:
        """The rows of a tensor; None if it is the same on every rank.

        Raises:
            NotExact: If it is not marked.
        """
        rows = rows_of(tensor)
        if rows is UNKNOWN and id(tensor) in self._constants:
            return None
        if rows is UNKNOWN or _of_foreign_function(tensor):
            raise NotExact(
                f"a tensor of shape {tuple(tensor.shape)} was not made by a watched call of torch (but by an "
                "extension, an autograd.Function, a global of a module), so nobody knows whether its rows are "
                "nodes, edges or the same on every rank; make it by torch functions, register it as a buffer, or pass "
                "it as an argument marked by part.nodes, part.edges or part.replicate."
            )
        if rows is not None and rows.axis.part is not self.part:
            raise NotExact(
                f"a tensor of {rows.axis.name} is of another part than the arguments, kept from an earlier call "
                "perhaps (cached=True?); clear what the model has kept of another graph."
            )
        return rows  # type: ignore[no-any-return]

    def known(self, tensor: Tensor) -> Rows:
        """The rows of a tensor that has some."""
        rows = self.rows(tensor)
        assert rows is not None
        return rows

    def with_values(self, call: Call) -> Call:
        """A call whose row numbers are values like any other, but in a tensor that it changes."""
        return call.mapped(self.as_values, start=int(call.in_place))

    def as_values(self, tensor: Tensor) -> Tensor:
        """Row numbers as the numbers that the whole graph's rows have: values like any other. *Collective*.

        Ranks have to be asked only for rows that were selected, joined or split.
        """
        rows = self.rows(tensor)
        if rows is None or rows.names is None:
            return tensor
        axes = [names.of for names in rows.names]
        of = [self.part.local_ids if axis is self.part.node_axis else axis.places for axis in axes]
        if len(of) == 1:
            values = of[0][tensor]
        else:  # a row of numbers for each end
            columns = zip(of, tensor.unbind(1 - rows.dim))
            values = torch.stack([ids[column] for ids, column in columns], 1 - rows.dim)
        values = mark(values.to(tensor.dtype), rows.but(names=None))
        self.versions.stands_in(values, tensor)
        return values

    def starts_fresh(self, axis: Axis) -> bool:
        """Whether new rows of an axis need no exchange: only nodes have ghosts, and a rank that is alone has none."""
        return self.alone or axis is not self.part.node_axis

    # The two lengths of node tensors

    def owned(self, tensor: Tensor) -> Tensor:
        """The tensor without the rows of ghosts."""
        rows = self.rows(tensor)
        if self.alone or rows is None or rows.axis is not self.part.node_axis:
            return tensor
        if not rows.fresh and tensor.size(rows.dim) == self.part.plan.num_owned:
            return tensor
        # Not kept: torch knows a view by its base, and a tensor that keeps a view of itself is never freed.
        without = rows.but(fresh=False, selections=rows.selections)
        owned = mark(tensor.narrow(rows.dim, 0, self.part.plan.num_owned), without)
        self.versions.seen((owned,))
        return owned

    def with_ghosts(self, tensor: Tensor) -> Tensor:
        """The tensor with up-to-date ghost rows. *Collective* if it has none yet: they are fetched once."""
        rows = self.rows(tensor)
        if self.alone or rows is None or rows.fresh or rows.axis is not self.part.node_axis:
            return tensor
        if rows.with_ghosts is not None and rows.with_ghosts.holds_for(tensor):
            return rows.with_ghosts.result
        # Another tensor of the same values may have been filled before.
        number = self.numbering.of(tensor)
        if number is not None and number in self._filled:
            return self._filled[number]
        self.combines_rows()
        self.part.num_exchanges += 1
        first = self.owned(tensor).movedim(rows.dim, 0)
        filled = self._extended(first.contiguous()).movedim(0, rows.dim)
        mark(filled, rows.but(fresh=True))
        rows.with_ghosts = CachedResult.of(tensor, filled)
        self.versions.seen((filled,))
        self.versions.stands_in(filled, tensor)
        if number is not None:
            self._filled[number] = filled
        return filled

    def _extended(self, owned: Tensor) -> Tensor:
        """Owned rows and those of ghosts; backward, where it computes owned rows again, keeps what came here."""
        num_owned = self.part.plan.num_owned
        return self.recomputation.instead(
            lambda: self.part.halo.extend(owned),
            lambda rows, ghosts: torch.cat([rows, ghosts]),
            owned,
            lambda filled: filled[num_owned:].detach().clone(),  # a copy, so that the table it lies in can go
        )

    def edges_read_nodes(self) -> None:
        """Note that edges read values of nodes."""
        self._phase = "edges"

    def edges_are_summed(self) -> None:
        """Note that something of edges, which read nodes before, is summed at nodes."""
        self._phase = "sums" if self._phase == "edges" else self._phase

    def _at_nodes_again(self, call: Call) -> bool:
        """Whether a call is the first after sums that computes with values of nodes only: edges leave least there."""
        if self._phase != "sums" or call.name in TAKES_SIZES or call.name in ("size", "shape"):
            return False
        return all(rows is None or rows.axis is self.part.node_axis for rows in map(self.rows, call.tensors))

    def noise_key(self) -> int:
        """The key of the next use of random numbers, the same on every rank.

        Raises:
            NotExact: If none are allowed.
        """
        if self.noise is None:
            raise NotExact("it draws random numbers where none were allowed (in evaluation, say).")
        self.uses += 1
        return self.noise(self.uses - 1)

    def fill_in_place(self, tensor: Tensor) -> None:
        """Bring ghosts up to date in a tensor whose owned rows were changed in place: it, and its views, stay fresh."""
        rows = self.known(tensor)
        if self.alone or rows.axis is not self.part.node_axis:
            return
        num_owned, num_ghosts = self.part.plan.num_owned, self.part.plan.num_ghosts
        # A clone: a view would change with the tensor, which is written into below.
        owned = mark(tensor.narrow(rows.dim, 0, num_owned).clone(), Rows(rows.axis, rows.dim, fresh=False))
        filled = self.with_ghosts(owned)
        tensor.narrow(rows.dim, num_owned, num_ghosts).copy_(filled.narrow(rows.dim, num_owned, num_ghosts))
        rows.with_ghosts = None

    def counted(self, tensor: Tensor) -> Tensor:
        """The rows that this rank counts, as a plain tensor."""
        rows = self.rows(tensor)
        if rows is None:
            return tensor
        self.combines_rows()
        tensor = self.owned(tensor)
        if rows.axis.counted is None:
            return tensor
        return tensor.index_select(rows.dim, rows.axis.counted.nonzero().view(-1))

    @contextmanager
    def rows_apart(self) -> Iterator[None]:
        """Inside, rows may not be combined: it is a block of them, and ranks have different numbers of blocks."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def combines_rows(self) -> None:
        """Note that something is summed over rows, at nodes, or needs ghosts.

        Raises:
            NotExact: If rows are to stay apart.
        """
        if self._apart:
            raise NotExact(APART)

    def common(self, call: Call) -> Call:
        """The call with node tensors all of one length: without ghosts if one of them has none up to date."""
        if self.alone or all(rows is None or rows.fresh for rows in map(self.rows, call.tensors)):
            return call
        return call.mapped(self.owned)

    @contextmanager
    def in_other_words(self) -> Iterator[None]:
        """Inside a rule: torch calls go through rules again, so that one call may be said as several."""
        TorchFunctionMode.__enter__(self)
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)

    # Calls without rows

    def _concerns_rows(self, call: Call) -> bool:
        sizes = call.name in TAKES_SIZES
        return any(
            self.rows(value) is not None if isinstance(value, Tensor) else sizes and type(value) is RowCount
            for value in flat((call.args, call.kwargs))
        )

    def _replicated(self, call: Call) -> Any:
        """A call on what every rank has gives what every rank has, unless chance plays a part."""
        # A gradient also of what every rank has: through sums, each rank has a share. All that draws has a rule.
        if call.name in DRAWS or (call.name in DROPS and call.drops) or call.name == "autograd.grad":
            if call.kwargs.get("out") is not None:
                raise NotExact(f"torch.{call.name} writes into a given tensor (out=); use the one it returns.")
            return RULES[call.name](self, call.with_first())
        if call.name == "register_hook":
            raise NotExact("register_hook in a forward pass: the hook would see one rank's share of a gradient.")
        result = call()
        for tensor in tensors_in(result):
            mark(tensor, None)
        return result


def watching() -> Watch | None:
    """The watch that torch calls of this thread go through now, if there is one."""
    return next((mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, Watch)), None)


def _of_foreign_function(tensor: Tensor) -> bool:
    """Whether an autograd.Function of somebody else made it: its backward is not watched, whatever its forward was."""
    function = tensor.grad_fn
    if not isinstance(function, BackwardCFunction):
        return False
    return not str(getattr(function, "_forward_cls", function).__module__).startswith("domainpar.")
