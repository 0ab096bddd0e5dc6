"""The switch that makes one rank fail at one place: unset it does nothing, misspelt it is refused."""

import errno
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from faults.on_purpose import ACTIONS, POINTS, Fault, switch

from domainpar.common import faults
from domainpar.common.problems import Problem


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    faults.arm(0, {})


def arm(text: str, rank: int = 0) -> None:
    faults.arm(rank, {faults.SWITCH: switch(text)})


def test_unset_or_meant_for_another_rank_every_place_gives_back_what_is_at_hand():
    rows = torch.ones(3)
    for rank, environ in ((0, {}), (1, {faults.SWITCH: switch("rank=0,at=loss,do=nan")})):
        faults.arm(rank, environ)
        assert faults._listening is None
        assert faults.reach("loss", rows) is rows
        assert rows.tolist() == [1, 1, 1]


def test_a_fault_happens_once_at_its_step():
    arm("rank=0,at=forward,step=3,do=raise")
    for step in (2, 4):
        faults.at("forward", step)
        faults.reach("forward")
    faults.at("forward", 3)
    faults.reach("backward")
    with pytest.raises(RuntimeError, match="fault on purpose at forward"):
        faults.reach("forward")
    faults.reach("forward")


def test_exchanges_are_counted_within_their_phase():
    arm("rank=0,at=halo_bwd:1,do=raise")
    for phase in ("forward", "evaluate", "backward"):
        faults.at(phase, 0)
        faults.reach("exchange")
        if phase != "backward":
            faults.reach("exchange")
    with pytest.raises(RuntimeError, match="halo_bwd"):
        faults.reach("exchange")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank=0", "needs rank, at and do"),
        ("rank=0,at=loss,do=nan,when=now", "needs rank, at and do"),
        ("rank=0,at=lunch,do=nan", "at=lunch; known: init"),
        ("rank=0,at=loss,do=dance", "do=dance; known: kill"),
        ("rank=one,at=loss,do=nan", "whole numbers"),
        ("rank=0,at=loss,do=swap", "do=swap does not go with at=loss"),
    ],
)
def test_what_cannot_be_understood_is_refused_on_every_rank(text, said):
    for rank in (0, 5):
        with pytest.raises(Problem, match=said) as problem:
            arm(text, rank)
        assert "rank=2,at=halo_bwd:1,step=3,do=kill" in problem.value.hint


def test_the_example_of_the_reference_is_understood():
    assert Fault.parse("rank=2,at=halo_bwd:L1,step=3,do=sleep:30") == Fault(2, "halo_bwd", "sleep", "30", 3, 1)


def test_a_value_becomes_nan_and_a_bit_flips():
    arm("rank=0,at=loss,do=nan")
    assert faults.reach("loss", torch.zeros(2, 2)).isnan().flatten().tolist() == [True, False, False, False]
    weights = torch.ones(3)
    arm("rank=0,at=stepped,do=flip")
    faults.reach("stepped", weights)
    assert weights[0] == torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert weights[1] == 1


def test_disks_are_full_memory_ends_and_signals_come():
    arm("rank=0,at=save,do=full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        faults.reach("save")
    arm("rank=0,at=forward,do=oom")
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        faults.reach("forward")
    came = []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        arm("rank=0,at=save,do=signal:USR1")
        faults.reach("save")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == [1]


def test_every_place_and_action_says_what_it_is():
    assert all(POINTS.values())
    assert all(ACTIONS.values())


@pytest.mark.parametrize("text", ["rank=0,at=loss,do=nan", "no/such/file.py rank=0,at=loss,do=nan", "/ words"])
def test_a_switch_that_names_no_file_is_refused_on_every_rank(text):
    for rank in (0, 5):
        with pytest.raises(Problem, match="is no Python file") as problem:
            faults.arm(rank, {faults.SWITCH: text})
        assert "or unset it" in problem.value.hint


def test_the_product_has_every_place_and_no_others():
    product = Path(faults.__file__).parents[1]
    passed = {
        point
        for path in product.rglob("*.py")
        for point in re.findall(r'faults\.reach\("([a-z:]+)"', path.read_text(encoding="utf-8"))
    }
    assert passed - {"exchange"} == set(POINTS) - {"halo_fwd", "halo_bwd"}
