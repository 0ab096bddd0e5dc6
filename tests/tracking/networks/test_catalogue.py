"""Networks by name: what is built, what a user's factory is called with, and what is refused and why."""

import sys
import threading

import own_models
import pytest
import torch
from torch import nn

from domainpar.nn.interaction import InteractionNetwork, InteractionsOnStages, OnStages
from domainpar.nn.options import NetworkOptions
from domainpar.nn.standard import Standard
from domainpar.tracking.config.train import BITWISE, MODELS, ON_STAGES
from domainpar.tracking.networks import catalogue
from domainpar.tracking.networks.catalogue import OF_THE_FIELD, build_model
from domainpar.tracking.networks.on_events import OnEvents

SIZES = {"hidden": 16, "graph_iters": 2}
NAMES = sorted(OF_THE_FIELD)


def built(name, **options):
    return build_model(name, 3, 6, NetworkOptions(**SIZES | options))


def own(name, **options):
    return built(f"own_models:{name}", **options)


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_names_of_the_command_line_are_those_that_can_be_built():
    assert set(MODELS) == catalogue.ORDERS.keys() | OF_THE_FIELD.keys()
    assert set(ON_STAGES) == catalogue.ORDERS.keys()
    assert set(BITWISE) == {name for name in MODELS if isinstance(built(name), OnStages)}


def test_networks_on_stages_are_themselves_and_all_others_run_on_events():
    assert all(isinstance(built(name), InteractionNetwork) for name in ON_STAGES)
    assert isinstance(built("acorn"), InteractionsOnStages)
    assert isinstance(built("acorn2"), OnEvents)


@pytest.mark.parametrize("name", [*NAMES, "own_models:evolving"])
def test_the_seed_decides_the_weights_and_torchs_own_generator_is_left_alone(name):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, again = bits(built(name, seed=1)), bits(built(name, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(one, again)
    if name in NAMES:
        assert not same(one, bits(built(name, seed=2)))


def test_a_factory_that_draws_has_a_generator_that_the_seed_decides(monkeypatch):
    monkeypatch.setattr(own_models, "drawing", own_models.Small, raising=False)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert same(bits(own("drawing", seed=1)), bits(own("drawing", seed=1)))
    assert not same(bits(own("drawing", seed=1)), bits(own("drawing", seed=2)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", NAMES)
def test_width_and_depth_reach_the_networks_of_the_field(name):
    def size(**options):
        return sum(one.numel() for one in built(name, **options).parameters())

    assert size(hidden=32) > size()
    if name not in BITWISE:
        assert size(hidden=7) < size(), "no multiple of 16 is asked for"
    assert type(built(name).module).__module__.startswith("domainpar.nn.")
    model = built(name, graph_iters=3)
    deeper = bits(model).keys() != bits(built(name)).keys()
    assert deeper or model.module.graph_iters == 3


@pytest.mark.parametrize("name", [*NAMES, "own_models:evolving"])
def test_all_parameters_and_buffers_are_of_the_type_asked_for(name):
    for dtype in (torch.float32, torch.float64):
        found = built(name, dtype=dtype).state_dict().values()
        assert {value.dtype for value in found if value.is_floating_point()} == {dtype}


def test_a_factory_is_called_with_those_options_that_it_takes():
    own_models.CALLS.clear()
    own("takes_all", seed=4, dropout=0.25)
    own("takes_some", seed=4)
    own("small", seed=4)
    assert own_models.CALLS == [
        {"node_features": 3, "edge_features": 6, "hidden": 16, "graph_iters": 2, "seed": 4, "dropout": 0.25},
        {"seed": 4, "hidden": 16, "other": 7},
    ]


def test_a_class_is_a_factory():
    assert isinstance(own("Small").module, own_models.Small)
    assert own("Small").module.lin.in_features == 3


OPTIONS = {
    "shared": ({"shared_weights": True}, "--shared-weights"),
    "standard": ({"standard": Standard.neutral(3, 6)}, "--standardise"),
    "residual": ({"residual": False}, "--no-residual"),
    "aggregate": ({"aggregate": "sum"}, "--aggregate"),
    "activation": ({"activation": "silu"}, "--activation"),
}


@pytest.mark.parametrize("name", [*NAMES, "own_models:small"])
@pytest.mark.parametrize(("option", "flag"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_stages_are_refused_for_other_networks_by_their_flags(name, option, flag):
    with pytest.raises(ValueError, match=f"--model {name} has no {flag}; .*interaction-node-first"):
        built(name, **option)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_refused_where_it_would_do_nothing(name):
    with pytest.raises(ValueError, match=f"--model {name} has no --dropout"):
        built(name, dropout=0.1)
    assert own("evolving", dropout=0.1).module.of_nodes[3].p == 0.1


REFUSED = {
    "no such module": ("no_such_module:net", "'no_such_module:net' .*ModuleNotFoundError"),
    "no such package": ("own_models.deeper:net", "ModuleNotFoundError: .*not a package"),
    "no such factory": ("own_models:nothing", "'own_models:nothing' .*AttributeError"),
    "no module made": ("own_models:makes_no_module", "str; .*torch.nn.Module"),
    "other arguments": ("own_models:OtherArguments", "adjacency; .*x, edge_index,"),
    "a module of torch": ("torch.nn:Identity", "forward needs input"),
}
FAILING = {
    "a factory that raises": ("own_models:breaks", "own_models:breaks.*no such layer"),
    "a factory with other arguments": ("own_models:wants_more", "own_models:wants_more.*depth"),
    "no factory": ("own_models:not_a_function", "own_models:not_a_function.*not a? ?callable"),
    "a class with other arguments": ("torch.nn:Linear", "torch.nn:Linear.*in_features"),
    "a name without a signature": ("builtins:dict", "builtins:dict"),
    "a mistake in the file": ("with_a_mistake:net", "with_a_mistake:net.*SyntaxError"),
    "a file that fails": ("that_fails:net", "that_fails:net.*ZeroDivisionError"),
    "a file that ends the program": ("that_exits:net", "that_exits:net.*SystemExit"),
}


@pytest.mark.parametrize(("name", "error"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_network_is_refused_with_its_name_and_what_to_do(name, error):
    with pytest.raises(ValueError, match=error):
        built(name)


def test_a_file_that_wants_torch_geometric_where_it_is_not_is_refused_with_the_extra_that_brings_it(
    tmp_path, monkeypatch
):
    (tmp_path / "of_pyg.py").write_text("from torch_geometric.nn import GCNConv as net\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.delitem(sys.modules, "torch_geometric.nn", raising=False)
    with pytest.raises(ValueError, match=r"'of_pyg:net' .*pip install 'domainpar\[pyg\]'"):
        built("of_pyg:net")


@pytest.mark.parametrize(("name", "error"), FAILING.values(), ids=FAILING)
def test_whatever_a_users_file_or_factory_raises_is_refused_with_its_name_and_what_it_was(
    tmp_path, monkeypatch, name, error
):
    (tmp_path / "with_a_mistake.py").write_text("def net(:\n")
    (tmp_path / "that_fails.py").write_text("1 / 0\n")
    (tmp_path / "that_exits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=error):
        built(name)


def test_a_class_without_a_beginning_of_its_own_is_called_with_nothing(monkeypatch):
    class Plain(nn.Module):
        def forward(self, x, edge_index):
            return x[edge_index[0], 0]

    monkeypatch.setattr(own_models, "plain", Plain, raising=False)
    assert list(own("plain").parameters()) == []


def test_networks_built_on_many_threads_have_the_weights_of_one():
    """Ranks as threads build at the same time; torch's generator is one for the whole process."""
    expected, found = bits(own("draws_slowly")), []
    ready = threading.Barrier(4)

    def build():
        ready.wait()
        found.append(bits(own("draws_slowly")))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [same(one, expected) for one in found] == [True] * 4
