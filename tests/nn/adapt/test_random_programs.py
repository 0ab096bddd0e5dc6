"""Random programs of torch calls: equal calls, draws, views, aliases, changes in place; none is wrong in silence."""

import pytest
import torch
from random_programs import WAYS, Program, Tally, run_split, settled

AT_A_TIME = 20


@pytest.fixture(autouse=True)
def _float64():
    """Single precision would turn rounding into other masks."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_programs(seeds):
    """Each program in two ways of splitting the graph, all ways in turn."""
    tally = Tally()
    programs = {seed: Program(seed) for seed in seeds}
    for program in programs.values():
        settled(program)
    for at, (num_ranks, policy) in enumerate(WAYS):
        for seed, program in programs.items():
            if at in (seed % len(WAYS), (seed + 3) % len(WAYS)):
                run_split(program, num_ranks, policy, tally)
    return tally


def test_random_programs_are_exact_or_refused():
    tally = check_programs(range(AT_A_TIME))
    assert tally.exact == 2 * AT_A_TIME
    assert tally.statements > 5 * tally.exact  # what refusals leave of a program is still one


@pytest.mark.slow
@pytest.mark.parametrize("first", range(AT_A_TIME, 200, AT_A_TIME))
def test_more_random_programs_are_exact_or_refused(first):
    assert check_programs(range(first, first + AT_A_TIME)).exact == 2 * AT_A_TIME
