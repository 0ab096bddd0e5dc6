"""Perceptrons on blocks are torch's own layers, and padding columns take no part."""

import pytest
import torch
from one_perceptron import back, forward, rows_of
from torch import nn

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.mlp import MLP, PaddedLinear, padded

SHAPES = {
    "hidden layers": (9, (32, 16), False),
    "one layer, no padding": (16, (48,), False),
    "a plain output of width 1": (21, (32, 32, 1), True),
    "a plain output alone": (3, (5,), True),
}


def make(in_features, widths, plain_output):
    mlp = MLP(in_features, widths, torch.Generator().manual_seed(1), plain_output).double()
    for norm in mlp.norms:  # other than the ones and zeros they begin with
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return mlp


def as_torch_layers(mlp):
    layers = []
    for position, linear in enumerate(mlp.linears):
        plain = nn.Linear(linear.in_features, linear.out_features).double()
        plain.load_state_dict(linear.state_dict())
        layers.append(plain)
        if position < len(mlp.norms):
            layers += [mlp.norms[position], nn.ReLU()]
    return nn.Sequential(*layers)


def on_a_tile(mlp, rows, upstream):
    """Outputs; what the last layer left, padding columns included; gradient of the rows, padding columns included."""
    out, every = rows.new_empty(len(rows), mlp.out_features), slice(0, len(rows))
    perceptron = forward(mlp, [rows], every, out)
    left = rows_of(perceptron, -1, len(rows))
    return out, left, back(mlp, [rows], every, upstream).of_tables[0]


@pytest.mark.parametrize(("in_features", "widths", "plain_output"), SHAPES.values(), ids=SHAPES)
def test_an_mlp_is_torchs_linear_layer_norm_and_relu_forward_and_backward(in_features, widths, plain_output):
    mlp = make(in_features, widths, plain_output)
    rows = torch.randn(45, in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = rows.clone().requires_grad_()
    expected = as_torch_layers(mlp)(plain)
    upstream = 1 - expected.detach().tanh() ** 2
    (theirs,) = torch.autograd.grad(expected, plain, upstream)
    out, _, ours = on_a_tile(mlp, rows, upstream)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours[:, :in_features], theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("in_features", "widths", "plain_output"), SHAPES.values(), ids=SHAPES)
def test_padding_columns_stay_zero_and_get_no_gradient(in_features, widths, plain_output):
    mlp = make(in_features, widths, plain_output)
    rows = torch.ones(5, in_features, dtype=torch.float64)
    _, product, gradient = on_a_tile(mlp, rows, torch.ones(5, widths[-1], dtype=torch.float64))
    assert product.shape == (5, padded(widths[-1], COLUMN_BLOCK))
    assert not product[:, widths[-1] :].any()
    assert gradient.shape == (5, padded(in_features, COLUMN_BLOCK))
    assert not gradient[:, in_features:].any()


def test_parameters_keep_their_true_shapes_and_depend_on_the_generator_alone():
    linear = PaddedLinear(9, 1, torch.Generator().manual_seed(3))
    again = PaddedLinear(9, 1, torch.Generator().manual_seed(3))
    assert linear.weight.shape == (1, 9)
    assert torch.equal(linear.weight, again.weight)
    assert linear.weight.abs().max() <= 1 / 3


@pytest.mark.parametrize(("width", "advice"), [(8, 16), (24, 32), (0, 16), (-16, 16), (33, 48)])
def test_a_normalised_width_that_would_need_padding_is_refused(width, advice):
    with pytest.raises(ValueError, match=f"hidden width {width} is not a multiple of 16; take {advice}"):
        MLP(9, (16, width), torch.Generator())
    with pytest.raises(ValueError, match="not a multiple of 16"):
        MLP(9, (width, 1), torch.Generator(), plain_output=True)
