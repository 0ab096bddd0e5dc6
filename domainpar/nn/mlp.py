"""The parameters of an MLP as kernels use them; `blocks` computes with them, on blocks of rows.

Inside a block every result has a multiple of 16 columns. Parameters keep their true shapes and are padded when used.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from domainpar.nn import COLUMN_BLOCK


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple


ACTIVATIONS = ("none", "relu", "silu", "tanh")
"""By the numbers that kernels know them by."""


class Linear(nn.Linear):
    """torch's own, whose parameters its hints call tensors: a name for types alone."""

    weight: nn.Parameter
    bias: nn.Parameter


class LayerShape(NamedTuple):
    """A layer without its numbers: layers of the same shapes are computed and summed by the same operations.

    Attributes:
        columns, out: Inputs, and outputs.
        normed, eps: Whether there is a norm, and what it adds to variances.
        activation: Its number in `ACTIVATIONS`.
        trained: Which of weight, bias, and scale and shift of the norm, if it has them.
        dtype: Type of the parameters.
    """

    columns: int
    out: int
    normed: bool
    eps: float
    activation: int
    trained: tuple[bool, ...]
    dtype: torch.dtype

    @property
    def padded(self) -> int:
        """Width of its results inside a block."""
        return padded(self.out, COLUMN_BLOCK)


class PerceptronLayer(NamedTuple):
    """One layer: a linear map, then a norm if there is one, then an activation, by its number in `ACTIVATIONS`."""

    linear: Linear
    norm: nn.LayerNorm | None
    activation: int

    @property
    def norm_parameters(self) -> list[nn.Parameter]:
        """Scale and shift of the norm; none without a norm, or of one that has none."""
        return [] if self.norm is None or self.norm.weight is None else [self.norm.weight, self.norm.bias]

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """Weight and bias of the linear map, then `norm_parameters`."""
        return [self.linear.weight, self.linear.bias, *self.norm_parameters]

    @property
    def shape(self) -> LayerShape:
        """All but its numbers."""
        linear, norm = self.linear, self.norm
        sizes, eps = (linear.in_features, linear.out_features), 0.0 if norm is None else float(norm.eps)
        trained = tuple(parameter.requires_grad for parameter in self.all_parameters)
        return LayerShape(*sizes, norm is not None, eps, self.activation, trained, linear.weight.dtype)


class MLP(nn.Module):
    """Linear layers, each followed by LayerNorm, or none, and activation; but for the last one, if that is a readout.

    A readout is linear, of any width and of the type of the parameters: numbers such as logits, which are neither
    summed at nodes nor used as states. All other widths are multiples of 16: a LayerNorm over padding would not be the
    LayerNorm of the model, and states are not copied to be padded.

    Args:
        net: A Sequential of linear layers, each followed by a LayerNorm or none, then by a ReLU, a SiLU, a Tanh or
            nothing, then, but for the last, by one Dropout each or none at all. Its modules stay those of `layers`:
            the parameters are its own, and may be replaced.
        readout: Whether the last layer is one.

    Attributes:
        layers: All layers, in order.
        dropout: Probability with which each result of a layer, but for the last one, is dropped in training.

    Raises:
        ValueError: If there is another module or another order, a layer without a bias, a width that is not a multiple
            of 16, a readout that is not linear, or dropout of some layers only, of several rates or of all numbers.
    """

    def __init__(self, net: nn.Module, readout: bool = False) -> None:
        super().__init__()
        if not isinstance(net, nn.Sequential):
            raise ValueError(f"an MLP is a Sequential of torch's layers; got {net}.")
        layers, rates = _layers_of(net)
        if not layers or (readout and (layers[-1].norm is not None or layers[-1].activation)):
            raise ValueError(f"a readout ends in a Linear, and every MLP has one; got {net}.")
        if rates and (len(set(rates.values())) > 1 or rates.keys() != set(range(len(layers) - 1))):
            raise ValueError(f"an MLP drops after each layer but the last, at one rate; got {net}.")
        widths = [layer.linear.out_features for layer in (layers[:-1] if readout else layers)]
        if bad := [width for width in widths if width <= 0 or width % COLUMN_BLOCK]:
            better = padded(max(bad[0], 1), COLUMN_BLOCK)
            raise ValueError(f"hidden width {bad[0]} is not a multiple of {COLUMN_BLOCK}; take {better}.")
        self.layers, self.readout, self.dropout = tuple(layers), readout, rates.get(0, 0.0)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout:g} is no probability below 1.")
        self.in_features, self.out_features = layers[0].linear.in_features, layers[-1].linear.out_features
        self.linears = nn.ModuleList(layer.linear for layer in layers)
        self.norms = nn.ModuleList(layer.norm for layer in layers if layer.norm is not None)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Those of its layers."""
        return tuple(layer.shape for layer in self.layers)

    def trained(self) -> list[nn.Parameter]:
        """Those of `parameters` that are trained, without a walk over modules: stages ask at each call."""
        of_layers = [layer.all_parameters for layer in self.layers]
        return [it for part in (slice(2), slice(2, None)) for own in of_layers for it in own[part] if it.requires_grad]


def _layers_of(net: nn.Sequential) -> tuple[list[PerceptronLayer], dict[int, float]]:
    """The layers that torch's modules make, and the rates of the dropout after them, by their places."""
    layers: list[PerceptronLayer] = []
    rates: dict[int, float] = {}
    for position, module in enumerate(net):
        # What may still be added to: nothing comes between dropout and the next layer.
        last = layers[-1] if layers and len(layers) - 1 not in rates else None
        if isinstance(module, nn.Linear) and module.bias is not None:
            layers.append(PerceptronLayer(cast(Linear, module), None, 0))
        elif isinstance(module, nn.LayerNorm) and last and last.norm is None and not last.activation:
            width = last.linear.out_features
            if module.normalized_shape != (width,) or len(list(module.parameters())) == 1:
                raise ValueError(
                    f"{module} does not norm the {width} columns before it with scale and shift, or with neither."
                )
            layers[-1] = last._replace(norm=module)
        elif type(module) in _NUMBER_OF and last and not last.activation:
            layers[-1] = last._replace(activation=_NUMBER_OF[type(module)])
        elif isinstance(module, nn.Dropout) and last:
            rates[len(layers) - 1] = module.p
        else:
            raise ValueError(
                f"module {position} of an MLP is {module}; take Linear with a bias, then LayerNorm or none, "
                "then ReLU, SiLU, Tanh or nothing, then Dropout or none."
            )
    return layers, rates


MODULES: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
"""torch's modules by the names of activations; none has none."""

_NUMBER_OF: dict[type, int] = {module: ACTIVATIONS.index(name) for name, module in MODULES.items()}


# An MLP takes `[x_src, x_dst, ...]`, but node nets take sums at `dst` before those at `src`: trained weights hold both
# orders. Tables at both ends of edges have that of the sums; only the next functions and `partials.order_at_ends` know
# the other.


def weights_at_ends(weight: Tensor, node_width: int) -> tuple[Tensor, Tensor]:
    """Columns of a first layer's weight for node states at `dst`, and for those at `src`, [out, node_width] each."""
    return weight[:, node_width : 2 * node_width], weight[:, :node_width]
