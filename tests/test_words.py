"""What commands tell the user to type, and how they count."""

import sys

import pytest

from domainpar import words


def test_one_is_said_without_an_s_and_equal_numbers_are_said_once():
    assert [words.several(1, "step"), words.several(1200, "step")] == ["1 step", "1,200 steps"]
    told = [words.between(counts, "hit") for counts in ([1, 1], [7, 7], [0, 1], [9, 1000])]
    assert told == ["1 hit", "7 hits", "0 to 1 hit", "9 to 1,000 hits"]


def test_the_first_of_many_names_are_told():
    assert words.some_of(["a", "b"]) == "a, b"
    assert words.some_of([*"abcdefghij"]) == "a, b, c, d, e, f, g, h and 2 more"


@pytest.mark.parametrize(("cores", "ranks"), [(1, []), (2, ["2"]), (64, ["8"])])
def test_no_more_ranks_are_proposed_than_the_machine_has_cores(monkeypatch, cores, ranks):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert words.on_ranks()[2:] == ranks


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment in the working directory, with an mpiexec; another Python on the path."""
    for program in (".venv/bin/python", ".venv/bin/mpiexec", "elsewhere/python"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    return tmp_path


def test_a_python_that_the_shell_would_not_find_is_named_by_its_path(environment, monkeypatch):
    monkeypatch.setenv("PATH", str(environment / "elsewhere"))
    assert (words.this_python(), words.its_mpiexec()) == (".venv/bin/python", ".venv/bin/mpiexec")


def test_in_an_active_environment_names_will_do(environment, monkeypatch):
    monkeypatch.setenv("PATH", str(environment / ".venv/bin"))
    assert (words.this_python(), words.its_mpiexec()) == ("python", "mpiexec")
