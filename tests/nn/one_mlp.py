"""An MLP's program on one tile, forward and back."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from domainpar.nn.blocks import AtEnds, MLPProgram, SumsAt, fold
from domainpar.nn.mlp import MLP, MODULES
from domainpar.nn.partials import Partials
from domainpar.nn.program import NOTHING, Program, shared, table, tiles_of
from domainpar.nn.published import plain_mlp
from domainpar.parallel.integer_sums import HI_SCALE, LO_SCALE

UNTOUCHED = -5.0


def an_mlp(
    in_features, widths, generator, readout=False, dropout=0.0, activation="relu", last_activation=None, norm=True
):
    """An MLP with these widths, drawn from a generator; a norm and an activation follow each layer."""

    def after(name):
        return lambda width: [
            *([nn.LayerNorm(width)] if norm else []), *([MODULES[name]()] if name in MODULES else [])
        ]  # fmt: skip

    def hidden(width):
        return [*after(activation)(width), *([nn.Dropout(dropout)] if dropout else [])]

    last = (lambda _: []) if readout else after(last_activation or activation)
    return MLP(plain_mlp(generator, (in_features, *widths), hidden, last), readout)


@dataclass
class Taker:
    """Takes gradients in the place of a stage."""

    parameters: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    rejected: int = 0

    def add_limbs(self, parameters, limbs, rejected, largest):
        self.parameters, self.rejected = parameters, rejected
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, one in zip(parameters, np.split(limbs, np.cumsum(sizes), axis=1)[:-1], strict=True):
            self.gradients.append(torch.from_numpy(one[0] / HI_SCALE + one[1] / LO_SCALE).view(parameter.shape))


def tile_of(rows, owned=True):
    tile = tiles_of(np.array([[rows.start, rows.stop]]))
    tile[:, -1] = owned
    return tile


def forward(mlp, tables, rows, out, *, node_width=0, products=None, ends=None, at_nodes=NOTHING, sums=None):
    """Results into rows of `out`; the MLP, of which `rows_of` may be asked."""
    program, folded = Program(), fold(mlp, tables, node_width, products)
    mlp_program = MLPProgram(program, folded, ends or AtEnds())
    mlp_program.forward([table(one) for one in tables], at_nodes, out=table(out), sums=sums or SumsAt())
    program.run(tile_of(rows))
    return mlp_program


def rows_of(mlp_program, layer, count):
    """What a layer left in the memory of this thread: bias added, and normed if it has a norm; padding included."""
    operand = mlp_program._rows[layer]
    kind = np.float64 if operand.dtype == torch.float64 else np.float32
    # Of a single tile it is the calling thread's, whatever team an earlier test left.
    rows, *_ = mlp_program._program.thread_arrays(operand, count * operand.width, kind)
    return torch.from_numpy(rows.reshape(count, operand.width).copy())


@dataclass
class Back:
    """What comes of the way back: gradients of the first product, of the tables with their padding, of parameters."""

    grad_product: torch.Tensor
    grad_tables: list
    of_parameters: list
    kind: torch.dtype
    rejected: int


def back(
    mlp, tables, rows, upstream, *, node_width=0, products=None, ends=None, at_nodes=NOTHING, sums=None, owned=True
):
    """Forward again, and back."""
    program, folded, grad_sink = Program(), fold(mlp, tables, node_width, products), Taker()
    mlp_program, partials = MLPProgram(program, folded, ends or AtEnds()), Partials(program, folded.exact)
    mlp_program.take_partials(partials)
    partials.close()
    mlp_program.forward([table(one) for one in tables], at_nodes)
    grad_product = mlp_program.backward(table(upstream), sums=sums or SumsAt())
    grad_tables = []
    for position, weight in enumerate(folded.inputs):
        grad_tables.append(upstream.new_full((len(upstream), weight.back.shape[1]), UNTOUCHED, dtype=folded.exact))
        mlp_program.input_grad(grad_product, position, table(grad_tables[-1]))
    partials.clear()
    program.run(tile_of(rows, owned))
    mlp_program.add_partials(partials.total(), grad_sink)
    assert grad_sink.parameters == list(mlp.parameters())
    count = rows.stop - rows.start
    kept = np.float64 if grad_product.dtype == torch.float64 else np.float32
    narrow = grad_product.dtype == torch.bfloat16
    made, *_ = program.thread_arrays(grad_product, count * grad_product.width, np.int16 if narrow else kept)
    made = torch.from_numpy(made.copy())
    made = (made.view(torch.bfloat16) if narrow else made).view(count, -1)
    return Back(made, grad_tables, grad_sink.gradients, grad_product.dtype, grad_sink.rejected)


def new_sums(num_nodes, width):
    """At ends, and at pairs: one for each `src`."""
    return torch.zeros(num_nodes, 2 * width).double(), torch.zeros(num_nodes, width).double()


def as_operands(sums):
    return SumsAt(*map(shared, sums))
