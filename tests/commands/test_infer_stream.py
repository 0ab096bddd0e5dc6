"""`infer --stream`: events as they come into a store, each written once, through kills, stops and bad events."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from forked import forked
from random_events import random_event
from random_store import write_graph
from spoilt_files import flip_a_byte
from test_infer import trained
from waiting import wait_until

from domainpar.common.agreement import Refused
from domainpar.infer import infer
from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, patient, run_ranks
from domainpar.tracking.config import ConfigError, InferConfig
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.scoring import inference as run

NUM_EVENTS = 24


def write_store(directory, numbers):
    """A store of so many small events; those that are there stay."""
    records = []
    for number in numbers:
        graph = random_event(number, 40, 90)
        tiles = np.random.default_rng(number).integers(0, 4, graph.num_nodes)
        records.append(write_graph(directory, graph, tiles, 4, "train"))
    write_manifest(directory, records, {})
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("stream")
    write_store(place / "store", range(NUM_EVENTS))
    tasks = write_store(place / "tasks", range(2))
    trained(tasks, place / "run", epochs=1)
    _stream(place, place / "whole")
    return place


def _stream(place, out, ranks=1, **flags):
    store = flags.pop("store", str(place / "store"))
    config = InferConfig(
        run=str(place / "run"), store=store, stream=True, **{"idle_seconds": 0.3, "out": str(out), **flags}
    )
    run_ranks(lambda world: infer(config, world, None), ranks)
    return json.loads((out / "stream.json").read_text())["session"]


def test_after_the_first_events_a_stream_waits_as_long_as_timeout_says(place, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(World, "set_deadline", lambda world, seconds: told.append(seconds))
    _stream(place, tmp_path / "out", timeout=17.5)
    assert set(told) == {17.5}


def files_in(out):
    return {path.name: path.read_bytes() for path in out.glob("*.scores.zarr.zip")}


def words(place, out, *more):
    command = [sys.executable, "-m", "domainpar.infer", "--run", place / "run", "--store", place / "store", "--stream"]
    return [str(word) for word in [*command, "--out", out, *more]]


def started(command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(number, out):
    wait_until(lambda: len(list(out.glob("*.scores.zarr.zip"))) >= number)


def _killed_after(number, place, out):
    """A session whose process is killed when so many events are written."""
    plain = os.replace

    def replace(source, target):
        plain(source, target)
        if len(list(out.glob("*.scores.zarr.zip"))) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace
    return _stream(place, out)


def test_a_session_that_is_killed_is_taken_up_and_no_event_is_written_twice(place, tmp_path):
    out = tmp_path / "out"
    with forked(_killed_after, 10, place, out) as program:
        assert program.wait()[0] == -signal.SIGKILL
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("*.scores.zarr.zip")}
    assert len(first) == 10
    session = _stream(place, out, ranks=3)
    assert session["events"] == NUM_EVENTS - len(first)
    assert files_in(out) == files_in(place / "whole")
    assert len(files_in(out)) == NUM_EVENTS
    assert all((out / name).stat().st_mtime_ns == written for name, written in first.items())


def test_files_are_those_that_infer_writes_without_it(place, tmp_path):
    config = InferConfig(run=str(place / "run"), store=str(place / "store"), out=str(tmp_path / "plain"))
    run_ranks(lambda world: infer(config, world, None), 2)
    assert files_in(tmp_path / "plain") == files_in(place / "whole")


@pytest.mark.slow
def test_sigterm_ends_it_after_the_events_under_way(place, tmp_path):
    out = tmp_path / "out"
    program = started(words(place, out))
    wait_for(10, out)
    program.send_signal(signal.SIGTERM)
    printed, errors = program.communicate(timeout=patient(60))
    assert program.returncode == 0, errors
    assert "stopping after the events under way" in errors
    done = json.loads((out / "stream.json").read_text())["session"]["events"]
    assert done == len(files_in(out)) == printed.count("logits sha256")
    _stream(place, out)
    assert files_in(out) == files_in(place / "whole")


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_events_that_come_while_it_waits_are_scored_by_ranks_of_mpi(place, tmp_path, capsys):
    store = write_store(tmp_path / "store", range(3))
    out = tmp_path / "out"
    command = words(place, out, "--store", store, "--idle-seconds", "3")
    program = started([find_mpiexec(), "-n", "2", *command])
    wait_for(3, out)
    write_store(store, range(7))
    printed, errors = program.communicate(timeout=patient(60))
    assert program.returncode == 0, errors
    assert len(files_in(out)) == 7
    assert "stream   : 7 events, " in printed
    assert "p95" in printed


def test_a_bad_event_is_left_out_and_the_others_are_scored(place, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(place / "store", store)
    spoilt = EventStore(store).events()[5]
    flip_a_byte(store / spoilt.path, "nodes/hit_id/c/0")
    session = _stream(place, tmp_path / "out", ranks=2, store=str(store))
    assert session["events"] == NUM_EVENTS - 1
    assert list(session["left_out"]) == [spoilt.event]
    assert set(session["seconds"]) == {"p50", "p95", "p99", "longest"}


def test_an_event_that_was_prepared_anew_is_scored_anew(place, tmp_path):
    store, out = tmp_path / "store", tmp_path / "out"
    write_store(store, range(4))
    assert _stream(place, out, store=str(store))["events"] == 4
    before = files_in(out)
    shutil.rmtree(store)
    records = []
    for number in range(4):
        graph = random_event(number, 40, 90 + (number == 2))
        tiles = np.random.default_rng(number).integers(0, 4, graph.num_nodes)
        records.append(write_graph(store, graph, tiles, 4, "train"))
    write_manifest(store, records, {})
    assert _stream(place, out, store=str(store))["events"] == 1
    after = files_in(out)
    assert sum(after[name] != before[name] for name in before) == 1


def test_tracks_with_those_of_the_ckf_do_not_join_others_in_one_stream(place, tmp_path, monkeypatch):
    _stream(place, tmp_path / "out", tracks="cc")
    monkeypatch.setattr(run, "_check_tracks", lambda *_: None)  # these hits lie on no surface that it knows
    with pytest.raises(Refused, match="holds a stream of another ckf"):
        _stream(place, tmp_path / "out", tracks="cc", ckf=True)


def test_other_scores_other_files_and_flags_about_all_events_are_refused(place, tmp_path):
    def refused(out, said, **flags):
        with pytest.raises((Refused, ConfigError), match=said):
            _stream(place, out, **flags)

    whole = place / "whole"
    before = files_in(whole)
    refused(whole, "holds a stream of another tracks", tracks="cc")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    refused(tmp_path / "mine", "holds files that are not scores")
    (tmp_path / "lost").mkdir()
    shutil.copy(next(whole.glob("*.scores.zarr.zip")), tmp_path / "lost")
    refused(tmp_path / "lost", "no stream.json")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "scores.json").touch()
    refused(tmp_path / "done", "holds finished scores")
    refused(tmp_path / "out", "--format acorn means nothing with --stream", format="acorn", tracks="cc")
    refused(tmp_path / "out", "--tune means nothing with --stream", tune=True, tracks="cc")
    with pytest.raises(ConfigError, match="--idle-seconds .*without --stream"):
        InferConfig(idle_seconds=1.0)
    assert files_in(whole) == before


@pytest.mark.slow
def test_a_store_that_vanishes_ends_it_with_one_line(place, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(place / "store", store)
    out = tmp_path / "out"
    program = started(words(place, out, "--store", store))
    wait_for(NUM_EVENTS, out)
    store.rename(tmp_path / "elsewhere")
    _, errors = program.communicate(timeout=patient(60))
    assert program.returncode == 1
    assert "Traceback" not in errors
    assert str(store) in errors
