"""Compiling: said once, done once for all processes of a machine, and no time of the work."""

import shutil
import subprocess
import sys
import time

import pytest
from numba import njit

from domainpar import compiling

KERNEL = "from numba import njit\n\n\n@njit(cache=True)\ndef add(a, b):\n    return a + b\n"

RANK = """
import sys
import time
from domainpar import compiling
from slow_kernel import add

lock = compiling.fcntl.flock
def slow(*how):
    lock(*how)
    time.sleep(0.5)  # so that the other process comes meanwhile
compiling.fcntl.flock, compiling.timeouts.COMPILING_SILENCE = slow, 0.1
compiling.watch_compiling(talks=True)
assert add(1, 2) == 3
print(sum(add.stats.cache_misses.values()), sum(add.stats.cache_hits.values()))
"""


def test_of_processes_that_want_a_kernel_at_once_one_compiles_it_and_all_say_so(tmp_path, monkeypatch):
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    texts = [rank.communicate(timeout=100) for rank in ranks]
    assert sorted(out.split() for out, _ in texts) == [["0", "1"], ["1", "0"]], texts
    assert [err.count("compiling: kernels for this machine") for _, err in texts] == [1, 1]


@pytest.fixture
def watched(capsys):
    compiling.watch_compiling(talks=True)
    yield capsys
    compiling.watch_compiling(talks=False)


def test_the_clock_stands_still_while_a_kernel_is_compiled_and_goes_on_after_it(watched):
    @njit
    def outer(count):
        return inner(count) + 1

    @njit
    def inner(count):
        return count * 2

    compiling._WATCH._said = False
    real, ours = time.perf_counter(), compiling.clock()
    assert outer(3) == 7
    compiled = time.perf_counter() - real
    assert 0 <= compiling.clock() - ours < 0.5 * compiled
    assert watched.readouterr().err.count("compiling: ") == 1
    real, ours = time.perf_counter(), compiling.clock()
    time.sleep(0.05)
    assert compiling.clock() - ours == pytest.approx(time.perf_counter() - real, abs=0.01)


def test_a_lock_that_nobody_gives_back_or_that_cannot_be_had_stops_nothing(monkeypatch, tmp_path):
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    program = (
        "import time\nfrom pathlib import Path\nfrom domainpar import compiling\nfrom slow_kernel import add\n"
        "compiling.timeouts.COMPILING, compiling._lock_file = 1.0, lambda: Path({file!r})\n"
        "compiling.watch_compiling(talks=True)\nbegan = time.perf_counter()\n"
        "assert (add(1, 2), add(1.0, 2.0)) == (3, 3.0)\nassert time.perf_counter() - began > {least}\n"
        "assert compiling._WATCH._alone == ({least} > 0)\n"
    )
    with (tmp_path / "held").open("w") as held:
        compiling.fcntl.flock(held, compiling.fcntl.LOCK_EX)
        for file, least in (("held", 1.0), ("no such directory/held", 0.0)):
            text = program.format(file=str(tmp_path / file), least=least)
            ended = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, timeout=60)
            assert ended.returncode == 0, ended.stderr.decode()
            shutil.rmtree(tmp_path / "kept")


def test_kernels_that_are_kept_are_loaded_without_the_lock(tmp_path, monkeypatch):
    """Ranks load some sixty kernels at every start: one after the other, many ranks would wait for long."""
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    program = "from domainpar import compiling\ncompiling.watch_compiling(True)\nfrom slow_kernel import add\nadd(1, 2)"
    text = "from domainpar import compiling\ncompiling.fcntl.flock = None\n" + program
    for code in (program, text):
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
