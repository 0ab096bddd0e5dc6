"""Random numbers are a function of what they are for: in kernels and in torch, forward and backward, on any ranks."""

import math
from itertools import combinations, product

import networks
import numpy as np
import pytest
import torch
from dense import keeps
from one_mlp import an_mlp
from one_operation import KINDS, call
from random_events import random_event
from tiled import TiledEvent, sha

from domainpar.nn import operations, stages
from domainpar.nn.kernels import EPS, KEPT, NUM_CONSTANTS, SHIFT
from domainpar.nn.mlp import padded
from domainpar.nn.noise import Noise, dropout_mask, key_of, random_bits, threshold_of

KEY = key_of(3, 5, "an event")
IDS = np.random.default_rng(0).permutation(10_000)[:300]


def layer_of(noise, layer, width, first, count, dtype):
    """Operands of a layer of some rows whose results are all 1 before numbers are dropped: no scale, and a shift of 1.

    With no ends and nothing that is summed.
    """
    constants = np.zeros((NUM_CONSTANTS, width), dtype)
    constants[SHIFT], constants[EPS], constants[KEPT] = 1, 1e-5, 1 / (1 - noise.rate)
    of_dropout = noise.ids[first : first + count], noise.key_of_layer(layer), threshold_of(noise.rate)
    rows, gradient = np.random.default_rng(1).standard_normal((2, padded(count, 8), width)).astype(dtype)
    work = rows, *(np.empty(shape, dtype) for shape in ((1, len(rows)), (2, 8))), gradient
    return constants, True, 1, *of_dropout, *work, *[0] * 6


def kept_by_forward(noise, layer, width, first, count, dtype):
    """What the kernel multiplies the results of some rows by, [count, width]."""
    out = np.empty((count, width), dtype)
    kernel = operations.layer_forward(width, KINDS[out.dtype], KINDS[out.dtype])
    call(kernel, *layer_of(noise, layer, width, first, count, dtype), 0, 0, out, count=count)
    return out


def kept_by_backward(noise, layer, width, first, count, dtype):
    """What it multiplies a gradient by: that of the shift of a row whose results have a gradient of 1."""
    found, kind = np.empty((count, width), dtype), KINDS[np.dtype(dtype)]
    for i in range(count):
        grad_constants, out, ones = np.zeros((3, width), dtype), np.empty((1, width), dtype), np.ones((1, width), dtype)
        operands = layer_of(noise, layer, width, first + i, 1, dtype)
        call(operations.layer_forward(width, kind, kind), *operands, 0, 0, 0, count=1)
        kernel = operations.layer_backward(width, kind, kind, kind, kind)
        call(kernel, *operands, 0, ones, 0, out, grad_constants, count=1)
        found[i] = grad_constants[2]
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("kernel", [kept_by_forward, kept_by_backward])
def test_kernels_drop_what_torch_drops_to_the_last_bit(kernel, rate, width, dtype):
    for layer, first, key in product((0, 1), (0, 17), (KEY, 0, 2**64 - 1)):
        noise = Noise(key, rate, IDS)
        found = kernel(noise, layer, width, first, 100, dtype)
        rows, like = slice(first, first + 100), torch.from_numpy(found)
        assert found.tobytes() == keeps(noise, layer, rows, like).numpy().tobytes()
        of_tensors = keeps(noise, layer, rows, like.bfloat16())  # as on GPUs, by integers with a sign
        assert torch.equal(of_tensors != 0, like != 0)
        assert 0 < np.count_nonzero(found) < found.size


def test_large_ids_are_told_apart_alike():
    noise = Noise(KEY, 0.5, np.array([0, 1, 2**31, 2**32, 2**40 + 3, 2**62]))
    found = kept_by_forward(noise, 0, 64, 0, 6, np.float64)
    assert found.tobytes() == keeps(noise, 0, slice(None), torch.from_numpy(found)).numpy().tobytes()
    assert len({row.tobytes() for row in found}) == 6


def kept(key, layer=0, rate=0.5, rows=4096, width=64, first_id=0):
    """Whether each number is kept, float64 [rows, width]."""
    noise = Noise(key, rate, np.arange(first_id, first_id + rows))
    return keeps(noise, layer, slice(None), torch.empty(0, width, dtype=torch.float64)).numpy() != 0


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_the_others_make_up_for_them(rate):
    """Within five standard deviations of a binomial, of all numbers and of each column."""
    numbers = kept(KEY, rate=rate)
    deviation = math.sqrt(rate * (1 - rate) / numbers.size)
    assert abs(numbers.mean() - (1 - rate)) < 5 * deviation
    assert (abs(numbers.mean(axis=0) - (1 - rate)) < 5 * deviation * math.sqrt(numbers.shape[1])).all()
    scaled = keeps(Noise(KEY, rate, np.arange(9)), 0, slice(None), torch.empty(0, 64, dtype=torch.float64))
    assert set(scaled.unique().tolist()) <= {0.0, 1 / (1 - rate)}


def test_how_many_of_a_row_or_column_are_dropped_spreads_as_it_should():
    """Were rows or columns not independent of each other, their counts would vary more, or less."""
    numbers = kept(KEY)
    for axis, count in ((0, numbers.shape[0]), (1, numbers.shape[1])):
        variance = numbers.sum(axis=axis).var(ddof=1) / (count / 4)
        number = numbers.shape[1 - axis]
        assert abs(variance - 1) < 5 * math.sqrt(2 / (number - 1)), f"axis {axis}"


OTHERS = {
    "the next column": lambda numbers: (numbers[:, :-1], numbers[:, 1:]),
    "the column 16 on": lambda numbers: (numbers[:, :-16], numbers[:, 16:]),
    "the next row": lambda numbers: (numbers[:-1], numbers[1:]),
    "the next row and column": lambda numbers: (numbers[:-1, 1:], numbers[1:, :-1]),
    "a row far away": lambda numbers: (numbers, kept(KEY, first_id=2**32)),
    "another layer": lambda numbers: (numbers, kept(KEY, layer=1)),
    "the next key": lambda numbers: (numbers, kept(KEY + 1)),
    "another step": lambda numbers: (numbers, kept(key_of(3, 6, "an event"))),
    "another event": lambda numbers: (numbers, kept(key_of(3, 5, "an even"))),
    "another seed": lambda numbers: (numbers, kept(key_of(4, 5, "an event"))),
}


@pytest.mark.parametrize("pair_up", OTHERS.values(), ids=OTHERS)
def test_a_number_says_nothing_of_any_other(pair_up):
    """Correlation of a quarter of a million pairs, within five standard deviations of none."""
    ours, theirs = (2.0 * numbers.ravel() - 1 for numbers in pair_up(kept(KEY)))
    assert abs((ours * theirs).mean()) < 5 / math.sqrt(ours.size)


def test_keys_tell_all_their_parts_apart():
    keys = [
        key_of(*parts) for parts in ((1, 2), (12,), ("1", 2), (1, "2"), ("1 2",), (2, 1), (), ("",), ("", ""), (-1,))
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert key_of(0, 7, "event") == key_of(0, 7, "event")


def test_numbers_are_those_of_earlier_versions():
    """Else a run that goes on would drop others than before."""
    assert key_of(1, "nodes", 2) == 2070405091483254370
    assert sha(torch.from_numpy(kept(key_of(1, "nodes", 2), rate=0.3, rows=64))) == "8a8b819f546339b9"


# Networks.

NUM_TILES = 12
FLAGS = {"dropout": 0.3, "graph_iters": 2}


@pytest.fixture(scope="module")
def event():
    graph = random_event(4, 90, 500, reach=2)
    return TiledEvent.of(graph, np.arange(90) * NUM_TILES // 90, NUM_TILES)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_backward_goes_through_the_numbers_that_forward_kept(event, order, layers, num_ranks):
    """Logits and all gradients are those of autograd with the masks written in."""
    flags = {**FLAGS, "order": order, "layers": layers}
    found = networks.on_ranks(event, num_ranks, key=KEY, **flags)
    assert networks.distance(found, networks.by_formula(event, KEY, **flags)) <= 1e-12
    if layers > 1:
        assert networks.distance(found, networks.by_formula(event, **flags)) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_both_copies_of_a_cut_edge_drop_alike_so_any_ranks_give_one_hash(event, order, dtype):
    answers = {
        networks.on_ranks(event, num_ranks, grouping=grouping, key=KEY, dtype=dtype, order=order, **FLAGS).sha
        for num_ranks, grouping in ((1, "ranges"), (2, "random"), (3, "ranges"), (5, "random"))
    }
    assert len(answers) == 1


def test_a_mask_by_local_rows_would_be_seen(event, monkeypatch):
    """The test above can fail: with numbers by the rows of a rank's tables, the two copies differ."""
    plain = stages.noise_of
    monkeypatch.setattr(stages, "noise_of", lambda mlp, key, ids: plain(mlp, key, np.arange(len(ids))))
    with pytest.raises(AssertionError, match="logits of two copies of an edge"):
        networks.on_ranks(event, 3, key=KEY, **FLAGS)


def test_without_key_or_without_rate_nothing_is_dropped(event):
    plain = networks.on_ranks(event, 1, graph_iters=2)
    for how in ({"key": None, "dropout": 0.3}, {"key": KEY, "dropout": 0.0}):
        assert networks.on_ranks(event, 1, graph_iters=2, **how).sha == plain.sha
    assert networks.on_ranks(event, 1, graph_iters=2, key=KEY, dropout=0.3).sha != plain.sha


def test_every_stage_of_a_network_has_masks_of_its_own(event, monkeypatch):
    """And each has the same ones again in backward; with shared weights too."""
    for order in ("edge-first", "node-first"):
        used = []

        def key_of_layer(noise, layer, plain=Noise.key_of_layer, used=used):
            used.append((noise.key, layer))
            return plain(noise, layer)

        with monkeypatch.context() as patched:
            patched.setattr(Noise, "key_of_layer", key_of_layer)
            networks.on_ranks(event, 1, key=KEY, order=order, shared_weights=True, dropout=0.3, graph_iters=3)
        num_stages = 2 + 3 + (3 if order == "node-first" else 2) + 1
        assert len({key for key, _ in used}) == num_stages
        assert {layer for _, layer in used} == {0, 1}
        assert len({kept(*which, rows=64).tobytes() for which in set(used)}) == num_stages + 1  # the head has two


def test_other_keys_drop_others(event):
    keys = [key_of(seed, step, name) for seed, step, name in product((0, 1), (0, 1), ("a", "b"))]
    answers = [networks.on_ranks(event, 1, key=key, **FLAGS).logits for key in keys]
    for one, other in combinations(answers, 2):
        assert sha(one) != sha(other)


@pytest.mark.parametrize("rate", [1.0, math.nan])
def test_a_rate_that_is_no_probability_below_1_is_refused(rate):
    with pytest.raises(ValueError, match="is no probability below 1"):
        an_mlp(16, (16, 16), torch.Generator(), dropout=rate)


def test_a_rate_next_to_1_drops_nearly_all():
    assert kept(KEY, rate=1 - 1e-12).sum() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999])
def test_the_compiled_mask_of_dropout_is_that_of_the_formula(rate, dtype):
    ids = torch.from_numpy(IDS)
    like = torch.empty(0, dtype=dtype)
    bits = random_bits(ids, KEY, 33, "cpu")
    expected = (bits >= round(rate * 2**32)).to(dtype) / (1 - rate)
    mask = dropout_mask(ids, KEY, 33, rate, like)
    assert torch.equal(mask == 0, expected == 0)
    torch.testing.assert_close(mask, expected, rtol=1e-6, atol=0)
    assert abs(float((mask == 0).double().mean()) - rate) < 0.02
    assert dropout_mask(ids[:0], KEY, 33, rate, like).shape == (0, 33)
