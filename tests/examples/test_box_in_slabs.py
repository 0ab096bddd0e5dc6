"""A code that owns its domains gets energies and forces of the whole box in `examples/domains.py`."""

import re
from pathlib import Path

import pytest
from forked import printed_by_ranks
from marks import slow

PROGRAM = Path(__file__).parents[2] / "examples/domains.py"
NUM_ATOMS = 120


@pytest.mark.parametrize("processes", [slow(1), slow(2), 3])
def test_energies_and_forces_in_domains_of_another_code_are_those_of_the_whole_box(processes):
    output = printed_by_ranks(PROGRAM, processes, "--steps", "3")
    gaps = re.findall(r"step \d: energy \S+, off by (\S+), forces off by (\S+)", output)
    assert len(gaps) == 3, output
    assert max(float(gap) for both in gaps for gap in both) < 1e-12
    held = [
        [int(number) for number in found] for found in re.findall(r": (\d+) atoms, (\d+) ghosts, (\d+) held", output)
    ]
    atoms, _, different = zip(*held, strict=True)
    assert sum(atoms) == NUM_ATOMS
    assert all(own + more > all_of for own, more, all_of in held), "no atom is a ghost twice"
    if processes > 1:
        assert max(different) < NUM_ATOMS, "a process that holds all atoms proves nothing"
    assert (min(atoms) == 0) == (processes == 3), "the second of three slabs is empty"
