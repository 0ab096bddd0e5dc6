"""A perceptron's program on one tile, forward and back."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from domainpar.nn.blocks import AtEnds, Perceptron, SumsAt, fold
from domainpar.nn.mlp import MLP, MODULES
from domainpar.nn.partials import Partials
from domainpar.nn.program import NOTHING, Program, shared, table, tiles_of
from domainpar.nn.published import perceptron
from domainpar.parallel.integer_sums import HI_SCALE, LO_SCALE

UNTOUCHED = -5.0


def an_mlp(
    in_features, widths, generator, readout=False, dropout=0.0, activation="relu", last_activation=None, norm=True
):
    """A perceptron with these widths, drawn from a generator; a norm and an activation follow each layer."""

    def after(name):
        return lambda width: [
            *([nn.LayerNorm(width)] if norm else []), *([MODULES[name]()] if name in MODULES else [])
        ]  # fmt: skip

    def hidden(width):
        return [*after(activation)(width), *([nn.Dropout(dropout)] if dropout else [])]

    last = (lambda _: []) if readout else after(last_activation or activation)
    return MLP(perceptron(generator, (in_features, *widths), hidden, last), readout)


@dataclass
class Taker:
    """Takes gradients in the place of a stage."""

    parameters: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    rejected: int = 0

    def give_limbs(self, parameters, limbs, rejected, largest):
        self.parameters, self.rejected = parameters, rejected
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, one in zip(parameters, np.split(limbs, np.cumsum(sizes), axis=1)[:-1], strict=True):
            self.gradients.append(torch.from_numpy(one[0] / HI_SCALE + one[1] / LO_SCALE).view(parameter.shape))


def tile_of(rows, owned=True):
    tile = tiles_of(np.array([[rows.start, rows.stop]]))
    tile[:, -1] = owned
    return tile


def forward(mlp, tables, rows, out, *, node_width=0, products=None, ends=None, at_nodes=NOTHING, sums=None):
    """Results into rows of `out`; the perceptron, of which `rows_of` may be asked."""
    program, folded = Program(), fold(mlp, tables, node_width, products)
    perceptron = Perceptron(program, folded, ends or AtEnds())
    perceptron.forward([table(one) for one in tables], at_nodes, out=table(out), sums=sums or SumsAt())
    program.run(tile_of(rows))
    return perceptron


def rows_of(perceptron, layer, count):
    """What a layer left in the memory of this thread: bias added, and normed if it has a norm; padding included."""
    operand = perceptron._rows[layer]
    kind = np.float64 if operand.dtype == torch.float64 else np.float32
    # Of a single tile it is the calling thread's, whatever team an earlier test left.
    rows, *_ = perceptron._program.of_threads(operand, count * operand.width, kind)
    return torch.from_numpy(rows.reshape(count, operand.width).copy())


@dataclass
class Back:
    """What comes of the way back: gradients of the first product, of the tables with their padding, of parameters."""

    of_product: torch.Tensor
    of_tables: list
    of_parameters: list
    kind: torch.dtype
    rejected: int


def back(
    mlp, tables, rows, upstream, *, node_width=0, products=None, ends=None, at_nodes=NOTHING, sums=None, owned=True
):
    """Forward again, and back."""
    program, folded, taker = Program(), fold(mlp, tables, node_width, products), Taker()
    perceptron, partials = Perceptron(program, folded, ends or AtEnds()), Partials(program, folded.exact)
    perceptron.take_partials(partials)
    partials.close()
    perceptron.forward([table(one) for one in tables], at_nodes)
    of_product = perceptron.backward(table(upstream), sums=sums or SumsAt())
    of_tables = []
    for position, weight in enumerate(folded.inputs):
        of_tables.append(upstream.new_full((len(upstream), weight.back.shape[1]), UNTOUCHED, dtype=folded.exact))
        perceptron.hand_back(of_product, position, table(of_tables[-1]))
    partials.clear()
    program.run(tile_of(rows, owned))
    perceptron.give(partials.total(), taker)
    assert taker.parameters == list(mlp.parameters())
    count = rows.stop - rows.start
    kept = np.float64 if of_product.dtype == torch.float64 else np.float32
    narrow = of_product.dtype == torch.bfloat16
    made, *_ = program.of_threads(of_product, count * of_product.width, np.int16 if narrow else kept)
    made = torch.from_numpy(made.copy())
    made = (made.view(torch.bfloat16) if narrow else made).view(count, -1)
    return Back(made, of_tables, taker.gradients, of_product.dtype, taker.rejected)


def new_sums(num_nodes, width):
    """At ends, and at pairs: one for each `src`."""
    return torch.zeros(num_nodes, 2 * width).double(), torch.zeros(num_nodes, width).double()


def as_operands(sums):
    return SumsAt(*map(shared, sums))
