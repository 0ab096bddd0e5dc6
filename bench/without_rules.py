"""The bitwise rules, each with the plain code that one would write without it, put in its place for a while.

Only the benchmark does this. The rules are those that the docstrings of `domainpar.nn.products`,
`domainpar.nn.tilewise` and `domainpar.parallel.integer_sums` speak of. Tables are of float32 or float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn import blocks, gradients, operations, tilewise
from domainpar.nn.blocks import AtEnds, SumsAt
from domainpar.nn.partials import Partials, Totals
from domainpar.nn.program import Program, shared
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray
from domainpar.tracking.training import loop, record


class FloatSums:
    """Takes the place of `IntegerSums`: partials are added in the precision they come in, over ranks as well."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(size, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, partials: Tensor, start: int = 0) -> None:
        self._sums = self._sums.to(torch.promote_types(self._sums.dtype, partials.dtype))
        self._sums[start : start + partials.numel()] += partials.detach().flatten()

    def add_rows(self, partials: Tensor, start: int = 0) -> None:
        self.add(partials.sum(0), start)

    def add_limbs(self, limbs: IntArray, rejected: int, start: int = 0) -> None:
        """Add sums of one rank's tiles, from `total_of_floats`."""
        sums = limbs[0].view(np.float64)
        narrow = sums.astype(np.float32)
        self.add(torch.from_numpy(narrow if np.array_equal(narrow, sums, equal_nan=True) else sums), start)

    def reduce(self, transport: Transport) -> None:
        # No transport adds floats, so they are gathered and added here, rank after rank.
        if transport.size == 1:
            return
        gathered = transport.all_gather(self._sums.numpy().tobytes())
        self._sums = sum(torch.frombuffer(bytearray(part), dtype=self._sums.dtype) for part in gathered)  # type: ignore

    def start_reduce(self, transport: Transport) -> FloatSums:
        self.reduce(transport)
        return self

    def finish(self) -> None:
        """Nothing is under way."""

    def total(self) -> Tensor:
        return self._sums.to(torch.float64, copy=True)  # `clear` is called while gradients are views of it

    @property
    def rejected(self) -> int:
        return int(self.rejected_now())

    def rejected_now(self) -> Tensor:
        return (~torch.isfinite(self._sums)).sum()

    def clear(self) -> None:
        self._sums.zero_()


# Operations of programs, compiled as those that they replace are.

_CODE = types.void(types.CPointer(types.int64), types.int64, types.int64)
_alive: list[Any] = []


def _address(function: Callable[..., None]) -> int:
    _alive.append(cfunc(_CODE)(function))
    return int(_alive[-1].address)


@cache
def add_floats(kind: torch.dtype) -> int:
    """Takes the place of `operations.split`: a tile's partials are added, as they are, to sums in the limbs' memory."""
    numbers, table = operations.NUMBERS[kind], operations._table

    def add_floats(arguments: Any, first: int, count: int) -> None:
        partials, sums = table(arguments, 0, 1, arguments[1], numbers), table(arguments, 2, 1, arguments[1], numbers)
        for i in range(partials.shape[1]):
            sums[0, i] += partials[0, i]

    return _address(add_floats)


def total_of_floats(self: Partials) -> Totals:
    """Takes the place of `Partials.total`: what `add_floats` has added up, as bits of float64."""
    of_threads = self._program.thread_arrays(self._limbs, self.size, operations.NUMBERS[self._exact])
    sums = np.sum(of_threads, axis=0, dtype=of_threads[0].dtype).astype(np.float64)
    return Totals(np.stack([sums, np.zeros_like(sums)]).view(np.int64), 0, 0.0)


@cache
def _library_product(kind: torch.dtype) -> Any:
    """BLAS's general matrix product, of the library that torch computes with."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    product = library.sgemm_ if kind == torch.float32 else library.dgemm_
    product.argtypes, product.restype = [ctypes.c_void_p] * 13, None
    return product


@cache
def library_rows(kind: torch.dtype, out_kind: torch.dtype) -> int:
    """Takes the place of `operations.multiply_rows`: a library's product.

    Its order of sums may depend on the number of rows.
    """
    product, numbers, table = _library_product(kind), operations.NUMBERS[kind], operations._table

    def library_rows(arguments: Any, first: int, count: int) -> None:
        inputs, outputs = arguments[1], arguments[4]
        rows, weight = table(arguments, 0, count, inputs, numbers), table(arguments, 2, inputs, outputs, numbers)
        out = table(arguments, 3, count, outputs, numbers)
        sizes = np.array([outputs, count, inputs], np.int32)
        factors, plain = np.array([1, arguments[5]], numbers), np.array([ord("N")], np.uint8)
        # BLAS sees tables by columns, so their transposes: out' = weight' rows'.
        product(
            plain.ctypes, plain.ctypes, sizes.ctypes, sizes[1:].ctypes, sizes[2:].ctypes, factors.ctypes,
            weight.ctypes, sizes.ctypes, rows.ctypes, sizes[2:].ctypes, factors[1:].ctypes, out.ctypes, sizes.ctypes,
        )  # fmt: skip

    return _address(library_rows)


@cache
def library_outer(kind: torch.dtype, of_gradient: torch.dtype) -> int:
    """Takes the place of `operations.outer_of_rows`, likewise."""
    product, numbers, table = _library_product(kind), operations.NUMBERS[kind], operations._table

    def library_outer(arguments: Any, first: int, count: int) -> None:
        inputs, outputs = arguments[1], arguments[3]
        rows, gradient = table(arguments, 0, count, inputs, numbers), table(arguments, 2, count, outputs, numbers)
        out = table(arguments, 4, inputs, outputs, numbers)
        sizes, one = np.array([outputs, inputs, count], np.int32), np.ones(1, numbers)
        forms = np.array([ord("N"), ord("T")], np.uint8)
        product(  # out' += gradient' rows
            forms.ctypes, forms[1:].ctypes, sizes.ctypes, sizes[1:].ctypes, sizes[2:].ctypes, one.ctypes,
            gradient.ctypes, sizes.ctypes, rows.ctypes, sizes[1:].ctypes, one.ctypes, out.ctypes, sizes.ctypes,
        )  # fmt: skip

    return _address(library_outer)


class DirectSums(tilewise._TileSums):
    """Edge rows are added to their `src` one by one, in the order in which tiles are computed, without partials."""

    def __init__(self, graph: LocalGraph, width: int, dtype: torch.dtype) -> None:
        super().__init__(graph, width, dtype)
        self.at_ends = torch.zeros(graph.num_owned, 2 * width, dtype=dtype)
        self._at_pairs = torch.zeros(graph.num_owned if width else 0, width, dtype=dtype)

    def cleared_by(self, program: Program) -> SumsAt:
        return SumsAt(shared(self.at_ends), shared(self._at_pairs)) if self._width else SumsAt()

    def finish(self, scale: Tensor | None = None) -> Tensor:
        if self._width:
            self.at_ends[:, self._width :] = self._at_pairs
        return self.at_ends if scale is None else (self.at_ends.unflatten(1, (2, -1)) * scale[..., None]).flatten(1)


def ends_without_pairs(graph: LocalGraph) -> AtEnds:
    """An edge's pair is its `src` itself."""
    src = graph.src.numpy()
    return AtEnds.of(src, graph.dst.numpy(), np.where(src < graph.num_owned, src, -1), graph.num_owned)


def plain_loss(logits: Tensor, graph: LocalGraph, weights: Tensor, step_weight: float, loss_sum: Any) -> Tensor:
    """Cross-entropy and its gradient on the whole table at once."""
    assert graph.label is not None
    z, y = logits.detach(), graph.label.to(logits.dtype)
    owned = torch.from_numpy(graph.plan.edge_owned).to(z.dtype)
    terms = F.binary_cross_entropy_with_logits(z, y, reduction="none") * weights * owned
    loss_sum.add(terms.sum().reshape(1) / step_weight)
    return (torch.sigmoid(z) - y) * weights / step_weight


RULES: dict[str, list[tuple[Any, str, Any]]] = {
    "integer sums": [
        *((module, "IntegerSums", FloatSums) for module in (gradients, record)),
        (operations, "split", add_floats),
        (blocks.Partials, "total", total_of_floats),
    ],
    "own products": [
        (operations, "multiply_rows", library_rows),
        (operations, "outer_of_rows", library_outer),
    ],
    "partials at src": [(tilewise, "_TileSums", DirectSums), (tilewise, "_ends", ends_without_pairs)],
    "loss by tiles": [(loop, "edge_loss", plain_loss)],
}
"""The rules that can be switched off: where, which name, and its replacement."""


@contextmanager
def without(rules: Sequence[str]) -> Iterator[None]:
    """Inside, the package computes without these rules, in all threads. Networks and trainers must be made inside."""
    # patch.object raises where the package has changed and there is nothing of that name left to replace.
    with ExitStack() as replaced:
        for rule in rules:
            for replacement in RULES[rule]:
                replaced.enter_context(patch.object(*replacement))
        yield
