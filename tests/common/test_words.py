"""What commands tell the user to type, how they count, and that none of them is silent for long."""

import pty
import re
import sys
import termios
import threading

import pytest

from domainpar.common import timeouts, words
from domainpar.testing import patient


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


# --- signs of life ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """A clock of our own for the signs of life of this process."""
    clock = Clock()
    monkeypatch.setattr(words.PROGRESS_LOG, "_clock", clock)
    monkeypatch.setattr(words.PROGRESS_LOG, "silence", timeouts.SILENCE)
    words.PROGRESS_LOG.spoke()
    return clock


def _after(clock, seconds):
    clock.now += seconds
    return words.PROGRESS_LOG.look()


def test_a_work_that_says_nothing_for_long_is_named_with_how_far_it_is(clock, capsys):
    words.PROGRESS_LOG._began = clock()
    words.PROGRESS_LOG.phase = "optimizer"  # of a step that was taken before
    with words.progress("learn a map", 1200, "event", talks=True, done=3) as advance:
        assert _after(clock, 9) == pytest.approx(1)
        advance(2, "loss 0.5")
        assert _after(clock, 1) == timeouts.SILENCE  # after how many seconds it may be time again
        with words.PROGRESS_LOG.doing("compare"):
            words.PROGRESS_LOG.phase = "load"
            _after(clock, 10)
        words.PROGRESS_LOG.say("a line")
        _after(clock, 9)
    out, err = capsys.readouterr()
    assert err.splitlines() == ["[10 s] learn a map: 5 of 1,200 events, loss 0.5", "[20 s] compare (load)"]
    assert out == "a line\n"
    _after(clock, 100)
    assert capsys.readouterr().err == "", "nothing is at hand"


def test_a_rank_that_does_not_talk_shows_no_work(clock, capsys):
    with words.progress("learn a map", 12, "event", talks=False) as advance:
        advance()
        _after(clock, 100)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_bar_goes_on_and_no_line_is_added(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with words.progress("learn a map", 12, "event", talks=True):
        capsys.readouterr()
        _after(clock, 100)
        assert re.fullmatch(r"\rlearn a map: +0%.*0/12.*", capsys.readouterr().err)


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (24, 60)])
def test_a_terminal_that_has_no_size_shows_the_bar_as_well(rows, columns, monkeypatch):
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (rows, columns))
    with open(its, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        with words.progress("learn a map", 12, "event", talks=True) as advance:
            advance(12)
        shown = screen.read(10_000).decode().split("\r")
    assert re.match(r"learn a map: +0%.*0/12", shown[1])
    assert len(shown[1]) <= (columns or 80)


def test_a_thread_looks_while_a_process_works_and_ends_with_it(monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(words.ProgressLog, "look", lambda voice: looked.set() or 1000.0)

    def fail():
        with words.ProgressLog().heard("train"):
            assert looked.wait(patient(60))
            assert "signs of life" in {thread.name for thread in threading.enumerate()}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "signs of life" not in {thread.name for thread in threading.enumerate()}


def test_warnings_of_a_command_stand_in_one_block_before_its_last_line(capsys):
    voice = words.ProgressLog()
    voice.say("WARNING: little memory")
    voice.say("         take more ranks")
    voice.say("step 1")
    voice.say("WARNING: little memory", sys.stderr)
    assert capsys.readouterr().out.splitlines() == ["WARNING: little memory", "         take more ranks", "step 1"]
    voice.tell("WARNING: odd", "done")
    voice.close("results", "next: this")
    block = ["WARNING: little memory", "         take more ranks", "WARNING: little memory", "WARNING: odd"]
    assert capsys.readouterr().out.splitlines() == ["done", "results", *block, "next: this"]
    voice.close("next: that")
    assert capsys.readouterr().out == "next: that\n", "those of the command before are told"
