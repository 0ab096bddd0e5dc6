"""`run_ranks` in a script of one's own: its functions are found, and no rank starts ranks."""

import sys

import pytest

from domainpar.testing import find_mpiexec, run_command

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
TRANSPORTS = ["threads", "gloo", pytest.param("mpi", marks=needs_mpi)]

SCRIPT = """
from domainpar.testing import run_ranks

class Answer:  # pickled by its name, too
    def __init__(self, rank):
        self.rank = rank

def work(world, factor):
    return Answer(factor * world.rank)

"""
CALL = "print([answer.rank for answer in run_ranks(work, 2, 10, transport={transport!r})])\n"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_function_of_the_script_itself_runs_on_every_transport(tmp_path, transport):
    script = tmp_path / "own.py"
    script.write_text(f"{SCRIPT}if __name__ == '__main__':\n    {CALL.format(transport=transport)}")
    code, output = run_command([sys.executable, str(script)], 60)
    assert (code, output.splitlines()[-1]) == (0, "[0, 10]"), output


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_a_script_that_calls_without_asking_whether_it_is_the_main_one_is_told_what_to_write(tmp_path, transport):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT + CALL.format(transport=transport))
    code, output = run_command([sys.executable, str(script)], 60)
    assert code == 1
    assert 'write the call under if __name__ == "__main__":' in output, output


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_a_function_that_is_in_no_file_is_refused_before_ranks_start(transport):
    code, output = run_command([sys.executable, "-c", SCRIPT + CALL.format(transport=transport)], 60)
    assert code == 1
    assert "ValueError: ranks that are processes cannot import work, which was typed and is in no file" in output
