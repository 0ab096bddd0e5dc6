"""Compiling: said once, done once for all processes of a machine, and no time of the work."""

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
compiling.fcntl.flock, compiling._SOON = slow, 0.1
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


def test_a_lock_that_nobody_gives_back_or_that_cannot_be_had_stops_nothing(watched, monkeypatch, tmp_path):
    @njit
    def double(count):
        return count * 2

    monkeypatch.setattr(compiling, "LONGEST_WAIT", 0.2)
    monkeypatch.setattr(compiling, "_lock_file", lambda: tmp_path / "held")
    with (tmp_path / "held").open("w") as held:
        compiling.fcntl.flock(held, compiling.fcntl.LOCK_EX)
        assert double(2) == 4
    monkeypatch.setattr(compiling, "_lock_file", lambda: tmp_path / "no such directory" / "held")
    assert double(2.0) == 4.0
