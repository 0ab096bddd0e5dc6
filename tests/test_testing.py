"""`run_ranks` in a script of one's own: its functions are found, and no rank starts ranks."""

import ast
import os
import sys
from pathlib import Path

import pytest

from domainpar import testing
from domainpar.testing import find_mpiexec, patient, run_command

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")

SCRIPT = """
from domainpar.testing import run_ranks

class Answer:  # pickled by its name, too
    def __init__(self, rank):
        self.rank = rank

def work(world, factor):
    return Answer(factor * world.rank)

"""
CALL = "print([answer.rank for answer in run_ranks(work, 2, 10, transport={transport!r})])\n"


@pytest.mark.parametrize(
    "transports", [("threads", "gloo"), pytest.param(("mpi",), marks=[needs_mpi, pytest.mark.slow])]
)
def test_a_function_of_the_script_itself_runs_on_every_transport(tmp_path, transports):
    script, deep = tmp_path / "own.py", tmp_path / ("scratch_of_job_" + "x" * 60) / ("y" * 60)  # as of a batch system
    deep.mkdir(parents=True)
    calls = "".join(f"    {CALL.format(transport=transport)}" for transport in transports)
    script.write_text(f"{SCRIPT}if __name__ == '__main__':\n{calls}")
    code, output = run_command([sys.executable, str(script)], 60, TMPDIR=str(deep))
    assert (code, output.splitlines()[-len(transports) :]) == (0, ["[0, 10]"] * len(transports)), output


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow])])
def test_a_script_that_calls_without_asking_whether_it_is_the_main_one_is_told_what_to_write(tmp_path, transport):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT + CALL.format(transport=transport))
    code, output = run_command([sys.executable, str(script)], 60)
    assert code == 1
    assert 'write the call under if __name__ == "__main__":' in output, output


def test_a_function_that_is_in_no_file_is_refused_before_ranks_start():
    calls = "for transport in ('gloo', 'mpi'):\n    try: run_ranks(work, 2, 10, transport=transport)\n"
    program = f"{SCRIPT}{calls}    except ValueError as refused: print(refused)\n"
    code, output = run_command([sys.executable, "-c", program], 60)
    assert code == 0, output
    assert output.count("ranks that are processes cannot import work, which was typed and is in no file") == 2, output


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (2.0, 2), (12.0, 12)])
def test_a_time_limit_grows_with_the_load_of_the_machine(monkeypatch, load, times):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(testing, "cores_here", lambda: {0, 1})
    monkeypatch.setattr(Path, "read_text", lambda path: f"{load} 0 0 1/100 7")
    assert patient(60) == 60 * times


def test_a_burst_counts_before_the_mean_of_a_minute_has_risen(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(testing, "cores_here", lambda: {0, 1})
    monkeypatch.setattr(Path, "read_text", lambda path: "0.00 0.00 0.00 8/100 7")
    assert patient(60) == 60 * 8


def test_no_program_of_a_test_has_a_limit_in_plain_seconds():
    plain = [
        f"{path.name}:{call.lineno}"
        for path in Path(__file__).parent.rglob("*.py")
        if "timeout=" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("run", "check_output", "check_call", "communicate", "HTTPConnection")
        and any(word.arg == "timeout" and isinstance(word.value, ast.Constant) for word in call.keywords)
    ]
    assert plain == [], "subprocess and its kin take timeout=patient(seconds)"
