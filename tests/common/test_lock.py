"""One run at a time in a directory: of several that start at once one wins, and what is left behind is explained."""

import fcntl
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest
from marks import fault

from domainpar.common.lock import RUN, STORE, Claim, Holder, left_behind
from domainpar.common.problems import Problem
from domainpar.testing import patient

LOCK = RUN.lock


def left_by(directory, **changes):
    """A lock as a process left it that was killed: this host's, but for some fields."""
    holder = replace(Holder.here({}), **{"pid": 7, **changes})
    (directory / LOCK).write_text(json.dumps(asdict(holder)))
    return holder


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path):
    claim = Claim.take(tmp_path, RUN)
    content = json.loads((tmp_path / LOCK).read_text())
    assert (content["pid"], content["host"]) == (os.getpid(), os.uname().nodename)
    assert claim.note == ""
    claim.release()
    claim.release()
    assert list(tmp_path.iterdir()) == []


@fault(47)
def test_a_second_run_is_refused_naming_host_and_process(tmp_path):
    Claim.take(tmp_path, RUN)
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(Problem, match=f"process {os.getpid()} on host"):
        Claim.take(tmp_path, RUN)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_a_store_has_the_same_lock_under_another_name_and_its_own_words(tmp_path):
    left_by(tmp_path)
    (tmp_path / LOCK).rename(tmp_path / STORE.lock)
    assert "earlier preparation" in Claim.take(tmp_path, STORE).note
    with pytest.raises(Problem, match=f"preparation .*process {os.getpid()} on") as refused:
        Claim.take(tmp_path, STORE)
    assert "--store" in refused.value.hint
    Claim.take(tmp_path, RUN)


HOLDS = (
    "import sys, pathlib; from domainpar.common.lock import RUN, Claim; Claim.take(pathlib.Path(sys.argv[1]), RUN); "
)


@fault(47)
def test_the_lock_of_a_process_that_was_killed_is_taken_over_and_it_is_said(tmp_path):
    program = [sys.executable, "-c", HOLDS + "print(1, flush=True); input()", str(tmp_path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "1\n"
        assert not left_behind(tmp_path, RUN)
        with pytest.raises(Problem, match=f"process {first.pid} on host"):
            Claim.take(tmp_path, RUN)
        first.kill()
    assert left_behind(tmp_path, RUN)
    claim = Claim.take(tmp_path, RUN)
    assert f"process {first.pid} on {os.uname().nodename} is gone" in claim.note
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    claim.release()
    assert left_behind(tmp_path, RUN)
    assert list(tmp_path.iterdir()) == []


@fault(47)
def test_a_run_on_another_host_is_never_taken_over_but_it_is_said_what_to_check_and_to_remove(tmp_path):
    """Some file systems know locks on each machine alone."""
    left_by(tmp_path, host="elsewhere")
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(Problem, match="process 7 on host elsewhere; from host") as refused:
        Claim.take(tmp_path, RUN)
    assert re.search(f"ps -p 7 on elsewhere; .* remove {tmp_path / LOCK}$", refused.value.hint)
    assert not left_behind(tmp_path, RUN)
    assert (tmp_path / LOCK).read_bytes() == before
    left_by(tmp_path, host="elsewhere", job="77")
    with pytest.raises(Problem, match="of SLURM job 77") as refused:
        Claim.take(tmp_path, RUN)
    assert "squeue -j 77" in refused.value.hint


@fault(47)
def test_of_two_containers_with_one_host_name_the_second_does_not_take_over_from_the_first(tmp_path):
    contained = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*contained, ""], capture_output=True, timeout=patient(60)).returncode
    ):
        pytest.skip("making PID namespaces needs unshare and root")
    first = subprocess.Popen(
        [*contained, HOLDS + "print(1, flush=True); input()", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert first.stdout.readline() == "1\n"
        second = subprocess.run([*contained, HOLDS, str(tmp_path)], capture_output=True, text=True, timeout=patient(60))
    finally:
        first.communicate("\n")
    assert "another run is at work" in second.stderr


SLURM = {"SLURM_JOB_ID": "77"}
REQUEUED = {
    "requeued once": ({"SLURM_RESTART_COUNT": "1"}, 0, True),
    "requeued again": ({"SLURM_RESTART_COUNT": "2"}, 1, True),
    "another step of the same job, not requeued": ({}, 0, False),
    "another job": ({"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}, 0, False),
}


@pytest.mark.parametrize(("environ", "restart", "taken"), REQUEUED.values(), ids=REQUEUED)
def test_a_job_that_slurm_has_requeued_elsewhere_goes_on_in_its_directory(tmp_path, environ, restart, taken):
    left_by(tmp_path, host="elsewhere", job="77", restart=restart)
    mine = Holder.here(SLURM | environ)
    if taken:
        assert "job 77 since" in Claim.take(tmp_path, RUN, mine).note
    else:
        with pytest.raises(Problem, match="another run"):
            Claim.take(tmp_path, RUN, mine)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"host": 3}', b"\xff"])
def test_a_lock_that_cannot_be_read_is_left_alone_and_named(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(Problem, match="its lock cannot be read") as refused:
        Claim.take(tmp_path, RUN)
    assert f"remove {tmp_path / LOCK}" in refused.value.hint
    assert (tmp_path / LOCK).read_bytes() == content
    assert not left_behind(tmp_path, RUN)


def test_a_lock_that_somebody_else_holds_by_now_is_not_removed(tmp_path):
    claim = Claim.take(tmp_path, RUN)
    (tmp_path / LOCK).unlink()  # by hand
    other = Claim.take(tmp_path, RUN)
    claim.release()
    assert (tmp_path / LOCK).exists()
    other.release()
    assert not (tmp_path / LOCK).exists()


def test_who_only_looks_keeps_nobody_from_a_lock(tmp_path):
    left_by(tmp_path)
    with (tmp_path / LOCK).open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (looking.fileno(), fcntl.LOCK_UN)).start()
        assert "taken over" in Claim.take(tmp_path, RUN).note


def _try_at_once(directory, gate, results):
    gate.wait()
    try:
        Claim.take(directory, RUN)
        results.put("won")
    except Problem as refused:
        results.put(refused.what)
    results.close()
    results.join_thread()
    time.sleep(30)  # alive, or its lock could be taken over


@fault(47)
@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "a lock left behind"])
def test_of_runs_that_start_at_once_exactly_one_wins(tmp_path, stale):
    context = multiprocessing.get_context("fork")
    for attempt in range(8):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        if stale:
            left_by(directory)
        gate, results = context.Barrier(4), context.Queue()
        runs = [context.Process(target=_try_at_once, args=(directory, gate, results)) for _ in range(4)]
        for run in runs:
            run.start()
        try:
            said = [results.get(timeout=patient(20)) for _ in runs]
        finally:
            for run in runs:
                run.kill()
                run.join()
        assert said.count("won") == 1, said
        assert all("another run" in words for words in said if words != "won")
        assert [path.name for path in directory.iterdir()] == [LOCK]
