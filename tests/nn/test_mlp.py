"""MLPs on blocks are torch's own layers, and padding columns take no part."""

import copy

import pytest
import torch
from one_mlp import an_mlp, back, forward, rows_of
from torch import nn

from domainpar.nn import COLUMN_BLOCK
from domainpar.nn.mlp import MLP, padded

SHAPES = {
    "hidden layers": (9, (32, 16), False),
    "one layer, no padding": (16, (48,), False),
    "a readout of width 1": (21, (32, 32, 1), True),
    "a readout alone": (3, (5,), True),
}


def make(in_features, widths, readout):
    mlp = an_mlp(in_features, widths, torch.Generator().manual_seed(1), readout).double()
    for norm in mlp.norms:  # other than the ones and zeros they begin with
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return mlp


@pytest.mark.parametrize(("in_features", "widths", "readout"), SHAPES.values(), ids=SHAPES)
def test_padding_columns_stay_zero_and_get_no_gradient(in_features, widths, readout):
    mlp = make(in_features, widths, readout)
    rows, every = torch.ones(5, in_features, dtype=torch.float64), slice(0, 5)
    product = rows_of(forward(mlp, [rows], every, rows.new_empty(5, mlp.out_features)), -1, 5)
    gradient = back(mlp, [rows], every, torch.ones(5, widths[-1], dtype=torch.float64)).grad_tables[0]
    assert product.shape == (5, padded(widths[-1], COLUMN_BLOCK))
    assert not product[:, widths[-1] :].any()
    assert gradient.shape == (5, padded(in_features, COLUMN_BLOCK))
    assert not gradient[:, in_features:].any()


def test_parameters_keep_their_true_shapes_and_depend_on_the_generator_alone():
    linear, again = (an_mlp(9, (1,), torch.Generator().manual_seed(3), readout=True).linears[0] for _ in range(2))
    assert linear.weight.shape == (1, 9)
    assert torch.equal(linear.weight, again.weight)
    assert linear.weight.abs().max() <= 1 / 3


@pytest.mark.parametrize(("width", "advice"), [(8, 16), (24, 32), (33, 48)])
def test_a_normalised_width_that_would_need_padding_is_refused(width, advice):
    with pytest.raises(ValueError, match=f"hidden width {width} is not a multiple of 16; take {advice}"):
        an_mlp(9, (16, width), torch.Generator())
    with pytest.raises(ValueError, match="not a multiple of 16"):
        an_mlp(9, (width, 1), torch.Generator(), readout=True)


def sequential(*modules, seed=4):
    """torch's layers in float64, with norms that scale and shift."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(*(module() for module in modules)).double()
        for module in net:
            for parameter in module.parameters() if isinstance(module, nn.LayerNorm) else ():
                nn.init.normal_(parameter)
    return net


def linear(wide, width, **options):
    return lambda: nn.Linear(wide, width, **options)


def norm(width, **options):
    return lambda: nn.LayerNorm(width, **options)


NETS = {
    "a norm in the middle only": ([linear(9, 32), nn.ReLU, linear(32, 16), norm(16), linear(16, 48), nn.Tanh], False),
    "linear states": ([linear(9, 16), norm(16), nn.SiLU, linear(16, 32)], False),
    "linear states alone": ([linear(9, 32)], False),
    "norms and ReLU": ([linear(9, 32), norm(32), nn.ReLU, linear(32, 16), norm(16), nn.ReLU], False),
    "a readout of width 1": (
        [linear(9, 32), norm(32), nn.ReLU, linear(32, 32), norm(32), nn.ReLU, linear(32, 1)],
        True,
    ),
    "a readout alone": ([linear(9, 5)], True),
    "no norm at all": ([linear(9, 16), nn.Tanh, linear(16, 16), nn.SiLU, linear(16, 3)], True),
    "norms without scale and shift": (
        [linear(9, 16), norm(16, elementwise_affine=False), nn.SiLU, linear(16, 16), norm(16), nn.Tanh],
        False,
    ),
}


@pytest.mark.parametrize(("modules", "readout"), NETS.values(), ids=NETS)
def test_a_perceptron_of_torchs_layers_is_these_layers_with_every_gradient(modules, readout):
    net = sequential(*modules)
    mlp = MLP(net, readout)
    rows = torch.randn(45, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = rows.clone().requires_grad_()
    expected = net(plain)
    upstream = 1 - expected.detach().tanh() ** 2
    theirs = torch.autograd.grad(expected, [plain, *mlp.parameters()], upstream)
    out, every = rows.new_empty(len(rows), mlp.out_features), slice(0, len(rows))
    forward(mlp, [rows], every, out)
    ours = back(mlp, [rows], every, upstream)
    assert set(mlp.parameters()) == set(net.parameters())
    torch.testing.assert_close(out, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours.grad_tables[0][:, :9], theirs[0], rtol=1e-12, atol=1e-12)
    for one, other in zip(ours.of_parameters, theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("readout", [False, True])
def test_dropout_after_each_layer_but_the_last_is_the_perceptrons(readout):
    first = [linear(9, 16), norm(16), nn.ReLU, lambda: nn.Dropout(0.25)]
    mlp = MLP(sequential(*first, linear(16, 16), lambda: nn.Dropout(0.25), linear(16, 16)), readout)
    assert (mlp.dropout, len(mlp.layers), len(mlp.norms)) == (0.25, 3, 1)


UNEVEN = {
    "two rates": [linear(9, 16), lambda: nn.Dropout(0.1), linear(16, 16), lambda: nn.Dropout(0.2), linear(16, 16)],
    "one layer alone": [linear(9, 16), linear(16, 16), lambda: nn.Dropout(0.1), linear(16, 16)],
    "the last": [linear(9, 16), lambda: nn.Dropout(0.1), linear(16, 16), lambda: nn.Dropout(0.1)],
    "the only one": [linear(9, 16), lambda: nn.Dropout(0.1)],
}


@pytest.mark.parametrize("modules", UNEVEN.values(), ids=UNEVEN)
def test_dropout_that_is_not_the_same_of_all_hidden_layers_is_refused(modules):
    with pytest.raises(ValueError, match="drops after each layer but the last, at one rate"):
        MLP(sequential(*modules))


@pytest.mark.parametrize(
    ("after", "said"),
    [(nn.ReLU, "module 2 .* ReLU"), (norm(16), "module 2 .* LayerNorm")],
    ids=["an activation", "a norm"],
)
def test_nothing_comes_between_dropout_and_the_next_layer(after, said):
    with pytest.raises(ValueError, match=said):
        MLP(sequential(linear(9, 16), lambda: nn.Dropout(0.1), after, linear(16, 16)))


def test_layers_follow_replaced_parameters_types_and_copies():
    net = sequential(*NETS["linear states"][0])
    mlp = MLP(net)
    mlp.linears[0].weight = nn.Parameter(torch.zeros(16, 9))
    assert mlp.layers[0].linear.weight is net[0].weight
    net.load_state_dict(sequential(*NETS["linear states"][0], seed=5).state_dict(), assign=True)
    assert mlp.layers[0].linear.weight is net[0].weight
    copied = copy.deepcopy(mlp).float()
    assert copied.layers[0].linear is copied.linears[0] is not mlp.linears[0]
    assert copied.layers[0].norm is copied.norms[0]
    assert (copied.layers[0].linear.weight.dtype, mlp.layers[0].linear.weight.dtype) == (torch.float32, torch.float64)


REFUSED = {
    "another module": ([linear(9, 16), nn.GELU], False, "module 1 of an MLP is GELU"),
    "another order": ([linear(9, 16), nn.ReLU, norm(16)], False, "module 2 of an MLP is LayerNorm"),
    "no bias": ([linear(9, 16, bias=False)], False, "module 0 .* take Linear with a bias"),
    "no linear layer": ([nn.ReLU], False, "module 0 of an MLP is ReLU"),
    "nothing": ([], False, "every MLP has one"),
    "a readout with an activation": ([linear(9, 1), nn.Tanh], True, "a readout ends in a Linear"),
    "states of another width": ([linear(9, 16), nn.ReLU, linear(16, 1)], False, "hidden width 1 is not a multiple"),
    "hidden layers of another width": ([linear(9, 20), nn.ReLU, linear(20, 1)], True, "width 20 .* take 32"),
    "a norm with a scale alone": ([linear(9, 16), norm(16, bias=False)], False, "scale and shift, or with neither"),
}


@pytest.mark.parametrize(("modules", "readout", "message"), REFUSED.values(), ids=REFUSED)
def test_other_layers_of_torch_are_refused(modules, readout, message):
    with pytest.raises(ValueError, match=message):
        MLP(sequential(*modules), readout)
