"""Random programs of torch calls: equal calls, draws, views, aliases, changes in place; none is wrong in silence."""

import pytest
import torch
from random_programs import Program, Tally, run_split, settled

AT_A_TIME = 20


@pytest.fixture(autouse=True)
def _float64():
    """Single precision would turn rounding into other masks."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_programs(seeds):
    """Each program on one rank, and on two or on three."""
    tally = Tally()
    for seed in seeds:
        program = Program(seed)
        settled(program)
        run_split(program, 2 + seed % 2, tally)
    return tally


def test_random_programs_are_exact_or_refused():
    tally = check_programs(range(AT_A_TIME))
    assert tally.exact == AT_A_TIME
    assert tally.statements > 5 * tally.exact  # what refusals leave of a program is still one


@pytest.mark.slow
@pytest.mark.parametrize("first", range(AT_A_TIME, 2000, 5 * AT_A_TIME))
def test_more_random_programs_are_exact_or_refused(first):
    programs = range(first, min(2000, first + 5 * AT_A_TIME))
    assert check_programs(programs).exact == len(programs)
