"""The condition grammar means what it says, and picks the particles it names."""

import numpy as np
import pytest
import yaml

from domainpar.tracking.config import Conditions
from domainpar.tracking.events.graph import Particles
from domainpar.tracking.events.targets import check_target, particle_quantity, passes, target_particles

NAN = float("nan")
VALUES = np.array([-1.0, 0.5, 1.0, 2.0, 7.0, NAN], np.float32)

MEANINGS = {
    "2": [2.0],
    "[1, 2]": [1.0, 2.0],
    "[0.5, .inf]": [0.5, 1.0, 2.0, 7.0],
    "[-.inf, 0.5]": [-1.0, 0.5],
    "[2, 2]": [2.0],
    "[in, [2, 7, 9]]": [2.0, 7.0],
    "[in, []]": [],
    "[not_in, [2, 7]]": [-1.0, 0.5, 1.0],
    "[is, 2]": [2.0],
    "[is_not, 2]": [-1.0, 0.5, 1.0, 7.0],
    "[within, [0.5, 2]]": [0.5, 1.0, 2.0],
    "[not_within, [0.5, 2]]": [-1.0, 7.0],
}


@pytest.mark.parametrize(("text", "met"), MEANINGS.items())
def test_a_condition_means_what_the_grammar_says_and_nan_meets_none(text, met):
    assert VALUES[passes(VALUES, yaml.safe_load(text))].tolist() == met


def test_a_decimal_is_compared_in_the_precision_of_the_values():
    values = np.array([0.1, 0.2], np.float32)
    for text in ("0.1", "[is, 0.1]", "[in, [0.1, 0.3]]", "[0.05, 0.1]"):
        assert passes(values, yaml.safe_load(text)).tolist() == [True, False], text


def test_large_particle_ids_are_told_apart():
    ids = np.array([2**60, 2**60 + 1])
    assert passes(ids, 2**60).tolist() == [True, False]
    assert passes(ids, ["in", [2**60 + 1]]).tolist() == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "high",
        "[high, 3]",
        "[1, 2, 3]",
        "[1]",
        "[]",
        "[above, 3]",
        "[in, 3]",
        "[is, [1, 2]]",
        "[within, 3]",
        "{a: 1}",
        "1e3",
    ],
)
def test_what_is_not_of_the_grammar_is_refused_with_the_grammar(text):
    with pytest.raises(ValueError, match=r"\[lo, hi\], \[in"):
        passes(VALUES, yaml.safe_load(text))


@pytest.mark.parametrize("text", ["[2, 1]", "[within, [.inf, 0]]", "[.nan, 1]"])
def test_an_interval_that_nothing_can_meet_is_refused(text):
    with pytest.raises(ValueError, match="empty interval"):
        passes(VALUES, yaml.safe_load(text))


def particles(**changed):
    fields = {
        "particle_id": np.array([11, 12, 2**60, 14]),
        "pt": np.array([0.4, 1.0, NAN, 5.0], np.float32),
        "eta": np.array([0.0, -1.0, 2.0, 3.0], np.float32),
        "vertex": np.array([[3, 4, 1], [0, 0, -2], [NAN, 0, 0], [30, 40, 9]], np.float32),
        "nhits": np.array([9, 3, 12, 1], np.int32),
        "charge": np.array([1, -1, 0, 1], np.int8),
    }
    return Particles(**{**fields, **changed})


QUANTITIES = {
    "pt: [1, .inf]": [12, 14],
    "eta: [not_within, [-0.5, 2.5]]": [12, 14],
    "nhits: [3, .inf]": [11, 12, 2**60],
    "charge: [in, [-1, 1]]": [11, 12, 14],
    "radius: [0, 5]": [11, 12],
    "vz: [is_not, 9]": [11, 12, 2**60],
    "particle_id: [not_in, [11, 1152921504606846976]]": [12, 14],
    "pt: [0.2, .inf], nhits: [3, .inf], radius: [0, 260]": [11, 12],
}


@pytest.mark.parametrize(("text", "chosen"), QUANTITIES.items())
def test_a_target_meets_all_conditions_on_its_quantities(text, chosen):
    table = particles()
    assert table.particle_id[target_particles(table, Conditions(text).value)].tolist() == chosen


def test_a_quantity_that_is_unknown_or_never_told_is_refused():
    with pytest.raises(ValueError, match="'pT', .*pt, eta, nhits"):
        particle_quantity(particles(), "pT")
    for name, values in (("pt", np.full(4, NAN, np.float32)), ("charge", np.zeros(4, np.int8))):
        with pytest.raises(ValueError, match=f"'{name}', but the source"):
            particle_quantity(particles(**{name: values}), name)


def test_an_event_without_particles_knows_no_targets():
    check_target(particles(), {"pt": [1, 2]})
    with pytest.raises(ValueError, match="needs a particle table"):
        check_target(None, {"pt": [1, 2]})
