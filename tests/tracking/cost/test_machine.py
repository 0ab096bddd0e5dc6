"""A machine is written, edited and read back; what is wrong with a description is said by its key."""

from dataclasses import replace

import pytest
import yaml

from domainpar.common.problems import Problem
from domainpar.tracking.cost.machine import Machine, this_machine

SOME = Machine("node", ranks=4, operations=6e13, memory=8e10, latency=2e-5, rate=2e11, busy=1.5)


def test_what_is_written_is_read_back(tmp_path):
    SOME.write(tmp_path / "m.yaml")
    assert Machine.read(tmp_path / "m.yaml") == SOME
    text = (tmp_path / "m.yaml").read_text()
    assert "# latency: Seconds of a message inside a machine." in text
    only = {name: getattr(SOME, name) for name in ("name", "ranks", "operations", "memory", "latency", "rate")}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(only).replace("60000000000000.0", "6e13"))
    assert Machine.read(tmp_path / "short.yaml") == replace(SOME, busy=1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speed": 1}, "unknown key speed"),
        ({"ranks": None}, "ranks is None, not a whole number"),
        ({"ranks": 2.5}, "ranks is 2.5, not a whole number"),
        ({"operations": "fast"}, "operations is 'fast', not a finite number above 0"),
        ({"rate": 0}, "rate is 0, not a finite number above 0"),
        ({"memory": True}, "memory is True"),
        ({"latency": -1}, "latency is -1"),
        ({"busy": float("inf")}, "busy is inf"),
        ({"gpus": True}, "unknown key gpus"),
    ],
)
def test_a_wrong_description_is_refused_by_its_key(tmp_path, change, said):
    SOME.write(tmp_path / "m.yaml")
    values = yaml.safe_load((tmp_path / "m.yaml").read_text())
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({**values, **change}))
    with pytest.raises(Problem, match=rf"--machine .*m.yaml: {said}"):
        Machine.read(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("text", "said"), [("- 1", "holds no keys"), ("a: [", "cannot be read"), ("name: x", "latency, memory, .* missing")]
)
def test_what_is_no_description_is_refused(tmp_path, text, said):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(Problem, match=said):
        Machine.read(tmp_path / "m.yaml")
    with pytest.raises(Problem, match="cannot be read"):
        Machine.read(tmp_path / "none.yaml")


def test_ranks_worth_a_look_are_those_of_one_machine_and_whole_ones():
    machine = replace(SOME, ranks=6, nodes=3)
    assert machine.numbers_of_ranks(64) == [1, 2, 3, 4, 6, 12, 18]
    assert machine.numbers_of_ranks(12) == [1, 2, 3, 4, 6, 12]


def test_this_machine_is_measured():
    here = this_machine(busy=1.25)
    assert here.busy == 1.25
    assert here.operations > 1e8
    assert here.ranks >= 1
