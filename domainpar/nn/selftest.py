"""Self-test of rule 1 of `docs/same_bits.md` on this machine.

In products and kernels as they are compiled here, a row of a block must depend neither on the other rows of the block
nor on its place, and all ranks must compute the same. The test takes some milliseconds on the shapes of the model. It
samples; it proves nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn import COLUMN_BLOCK, operations
from domainpar.nn.blocks import AtEnds, Folded, MLPProgram, fold
from domainpar.nn.mlp import MLP, padded
from domainpar.nn.partials import Partials
from domainpar.nn.program import Program, shared, table, tiles_of
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.parallel.transport import Transport

SAMPLE_ROWS = 1000  # no multiple of what products take at once: the last rows sit in a ragged tail
SUBSETS = (1, 7, 33, 500)
FIRST_OF_SUBSET = 37

_Results = tuple[Tensor, ...]
"""Of some rows: forward, then backward, then what is not row by row."""


def rows_are_independent(model: nn.Module, transport: Transport) -> str | None:
    """Try every distinct MLP of a model on whole and on partial blocks, with one thread. *Collective*.

    Returns:
        None if all rows kept their bits, forward and backward, and all ranks got the same ones; else what differed, in
        words, the same on every rank.
    """
    digest = hashlib.sha256()
    problem = ""
    # Layers of the same shapes run the same machine code: one of them is tried.
    for case in {case.shapes: case for case in _cases(model)}.values():
        for trial in case.trials():
            whole = trial.run(trial.tables, slice(0, SAMPLE_ROWS))
            digest.update(b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in whole))
            problem = problem or _compare_subsets(trial, whole)
    reports = [text.decode() for text in transport.all_gather(f"{digest.hexdigest()} {problem}".encode())]
    problems = sorted({text[65:] for text in reports} - {""})  # behind the 64 digits of the hash and a blank
    if problems:
        return problems[0]
    if len(set(reports)) > 1:
        return "ranks compute different bits from the same numbers: their machines or numba versions differ"
    return None


@dataclass(frozen=True)
class _StageTrial:
    """Something that a stage does with the rows `run(tables, rows)` of some tables, [SAMPLE_ROWS, ...] each."""

    run: Callable[[Sequence[Tensor], slice], _Results]
    tables: Sequence[Tensor]
    about: str


def _compare_subsets(trial: _StageTrial, whole: _Results) -> str:
    generator = torch.Generator().manual_seed(1)
    for size in SUBSETS:
        chosen = torch.randperm(SAMPLE_ROWS, generator=generator)[:size]
        rows = slice(FIRST_OF_SUBSET, FIRST_OF_SUBSET + size)
        # The chosen rows lie elsewhere, beside other neighbours and in a block of another size: their bits must stay.
        moved = [table.clone() for table in trial.tables]
        for there, here in zip(moved, trial.tables):
            there[rows] = here[chosen]
        # Gradients of weights, the third result, are sums over all rows: they are in the hash that ranks compare.
        for direction, of_subset, of_all in zip(("forward", "backward"), trial.run(moved, rows), whole):
            if not torch.equal(of_subset, of_all[chosen]):
                return (
                    f"rows of a {trial.about} block change with the other rows of the block ({direction}, {size} of "
                    f"{SAMPLE_ROWS} rows): code compiled on this machine does not keep rows apart"
                )
    return ""


@dataclass(frozen=True)
class _Case:
    """An MLP and the inputs it may get.

    Attributes:
        mlp: The MLP.
        node_width: Width of node states at either end; 0 for none.
        widths: Widths of the tables after them.
        kind: Type of these tables.
        products: As in `EdgeStage`.
    """

    mlp: MLP
    node_width: int
    widths: tuple[int, ...]
    kind: torch.dtype
    products: torch.dtype | None = None

    @property
    def shapes(self) -> tuple[object, ...]:
        """Equal for cases that are tried alike."""
        return self.mlp.shapes, self.mlp.readout, self.node_width, self.widths, self.kind, self.products

    def trials(self) -> Iterator[_StageTrial]:
        """The work of tiles: products of node states, and the MLP on a block of edges or nodes."""
        generator = np.random.default_rng(0)  # much faster than torch's
        exact = next(self.mlp.parameters()).dtype

        def drawn(width: int, kind: torch.dtype = exact) -> Tensor:
            return torch.from_numpy(generator.random((SAMPLE_ROWS, width)) - 0.5).to(kind)

        tables = [drawn(width, self.kind) for width in self.widths]
        width = padded(self.mlp.layers[0].linear.out_features, COLUMN_BLOCK)
        at_nodes, grad_sums = drawn(2 * width), drawn(2 * self.mlp.out_features)
        folded = fold(self.mlp, tables, self.node_width, self.products)
        if self.node_width:
            grad_nodes = [drawn(self.node_width), drawn(2 * width)]
            yield _StageTrial(partial(_products_of_nodes, folded), grad_nodes, f"{self.node_width}-column {exact}")
        else:
            at_nodes = at_nodes[:0]
        if not self.node_width or self.mlp.readout:  # a readout is summed nowhere
            grad_sums = grad_sums[:0]
        ends = torch.from_numpy(generator.integers(0, SAMPLE_ROWS, (2, SAMPLE_ROWS)))
        upstream = drawn(self.mlp.out_features, exact if self.mlp.readout else self.products or exact)
        about = f"{self.mlp.in_features}-column {self.products or exact}"
        yield _StageTrial(partial(_block, folded, at_nodes, grad_sums), [*tables, *ends, upstream], about)


def _cases(model: nn.Module) -> Iterator[_Case]:
    """Every stage as the built-in networks call it: its node states are what some node stage makes."""
    stages = [module for module in model.modules() if isinstance(module, NodeStage | EdgeStage)]
    node_widths = sorted({stage.mlp.out_features for stage in stages if isinstance(stage, NodeStage)})
    for stage in stages:
        mlp, columns = stage.mlp, stage.mlp.in_features
        exact = next(mlp.parameters()).dtype
        if isinstance(stage, NodeStage):
            for first in [width for width in node_widths if width < columns] or [columns]:
                yield _Case(mlp, 0, _filled(first, columns - first), exact)
            continue
        takes_nodes = not (mlp.readout and len(mlp.linears) == 1)
        for width in [width for width in node_widths if takes_nodes and 2 * width <= columns] or [0]:
            for kind in dict.fromkeys((exact, stage.products or exact)):
                yield _Case(mlp, width, _filled(columns - 2 * width), kind, stage.products)


def _filled(*widths: int) -> tuple[int, ...]:
    return tuple(width for width in widths if width)


def _products_of_nodes(folded: Folded, tables: Sequence[Tensor], rows: slice) -> _Results:
    """Of states, and of the gradient of what comes of them."""
    outs, program = [], Program()
    for states, weight in zip(tables, folded.at_ends):
        outs.append(states.new_empty(len(states), weight.shape[1], dtype=weight.dtype))
        operations.multiply(program, table(states), weight, table(outs[-1]))
    program.run(tiles_of(np.array([[rows.start, rows.stop]])))
    return tuple(out[rows] for out in outs)


def _block(folded: Folded, at_nodes: Tensor, grad_sums: Tensor, tables: Sequence[Tensor], rows: slice) -> _Results:
    """Forward and backward through a block of edges, or of nodes."""
    *operands, src, dst, upstream = tables
    # Sums at ends are left out: they run over the rows of a block, and are not to be the same for fewer of them.
    ends = AtEnds.of(src.numpy(), dst.numpy(), np.full(SAMPLE_ROWS, -1), num_owned=0)
    inputs, gathered = [table(operand) for operand in operands], (shared(at_nodes), shared(grad_sums))
    out, tiles, program = torch.empty_like(upstream), tiles_of(np.array([[rows.start, rows.stop]])), Program()
    MLPProgram(program, folded, ends).forward(inputs, gathered[0], out=table(out))
    program.run(tiles)

    program = Program()
    mlp_program, partials = MLPProgram(program, folded, ends), Partials(program, folded.exact)
    mlp_program.take_partials(partials)
    partials.close()
    mlp_program.forward(inputs, gathered[0])
    grad_product = mlp_program.backward(table(upstream), gathered[1])
    grad_operands = [torch.zeros_like(operand) for operand in operands]
    into = torch.empty(SAMPLE_ROWS, folded.width, dtype=grad_product.dtype)
    operations.copy(program, grad_product, table(into))
    for position, grad_operand in enumerate(grad_operands):
        mlp_program.input_grad(grad_product, position, table(grad_operand))
    partials.clear()
    program.run(tiles)
    grad_rows = [each[rows].to(folded.exact) for each in (into, *grad_operands)]
    return out[rows], torch.cat(grad_rows, dim=1), torch.from_numpy(partials.total().limbs.copy())
