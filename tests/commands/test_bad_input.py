"""What cannot be trained on is refused by all ranks: naming event, file and rank, exit code 2, nothing written."""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import without_signs_of_life
from marks import fault
from random_events import random_assignment, random_event
from random_store import NUM_TILES, write_graph, write_random_store

from domainpar import export, infer, prepare, report, train
from domainpar.common.agreement import Refused
from domainpar.common.words import on_ranks, this_python
from domainpar.testing import find_mpiexec, run_command, run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import write_manifest
from domainpar.train import train as train_on_ranks

PROGRAM = str(Path(__file__).with_name("damaged_while_training.py"))
MPIEXEC = find_mpiexec()
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")
SMALL = "--hidden 16 --graph-iters 1 --epochs 1".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a store of four events and a run that was trained on it."""
    place = tmp_path_factory.mktemp("place")
    write_random_store(place / "store")
    assert train.main(["--store", str(place / "store"), "--out", str(place / "run"), *SMALL]) == 0
    return place


@pytest.fixture
def copy(place, tmp_path):
    """A copy of it to spoil."""
    shutil.copytree(place, tmp_path / "copy")
    return tmp_path / "copy"


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def exit_code(argv):
    try:
        return train.main(argv)
    except SystemExit as ended:
        return ended.code


def refusal(capfd, directory, *argv):
    """What is printed for these words, which must be refused with exit code 2 and leave the directory as it is."""
    before = contents(directory)
    assert exit_code([*map(str, argv), *SMALL]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    assert contents(directory) == before
    return err


def event_file(store, number=1):
    return store / f"event{number:09d}.zarr.zip"


def without_truth(store):
    write_random_store(store, num_train=1, num_val=1, labels=False)


def other_particles(store, **changed):
    """One event whose particles are known only in part, or not at all."""
    graph = random_event(0)
    particles = replace(graph.hits.particles, **changed) if changed else None
    graph = replace(graph, hits=replace(graph.hits, particles=particles))
    tiles = random_assignment(0, graph.num_nodes, NUM_TILES)
    write_manifest(store, [write_graph(store, graph, tiles, NUM_TILES, "train")], {})


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def overwritten_end(path):
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))


def kept(path):
    """Good as it is."""


def emptied(store):
    write_random_store(store, num_train=0, num_val=2)


SPOILT = {  # how, the flags, and a pattern of the values and the remedy that the refusal names
    "no store": (shutil.rmtree, [], "store .*manifest.json\nhint: .*python -m domainpar.prepare"),
    "no manifest": (lambda store: (store / "manifest.json").unlink(), [], "no manifest.json"),
    "a damaged manifest": (lambda store: cut_off(store / "manifest.json"), [], "manifest.json"),
    "a missing event": (
        lambda store: event_file(store).unlink(),
        [],
        r"No such file .* \| event 000000001 \| file {store}/event000000001.zarr.zip\n",
    ),
    "a truncated event": (lambda store: cut_off(event_file(store)), [], " bytes, .*manifest .*event 000000001 "),
    "a damaged event": (
        lambda store: overwritten_end(event_file(store)),
        [],
        r"BadZipFile.* \| event 000000001 \| file {store}/event000000001.",
    ),
    "no truth": (without_truth, [], "1 training event of store {store} .*truth"),
    "nothing to train on": (emptied, [], "store {store} .*no training events\nhint: .*--val-split"),
    "no edge at all": (
        lambda store: write_random_store(store, num_train=1, num_val=1, num_edges=0),
        [],
        "no candidate edge in 1 training event of {store}.*\nhint: .*--phi-slope",
    ),
    "an unknown quantity": (kept, ["--target", "pT: [1, .inf]"], "'pT'"),
    "a condition of no grammar": (kept, ["--target", "pt: [above, 1]"], "above"),
    "a quantity that is not told": (
        lambda store: other_particles(store, pt=random_event(0).hits.particles.pt * float("nan")),
        ["--target", "pt: [1, .inf]"],
        "'pt', but the source",
    ),
    "no particles": (other_particles, ["--target", "pt: [1, .inf]"], "--target .*particle table"),
}


@fault(27)
@pytest.mark.parametrize(("spoil", "flags", "error"), SPOILT.values(), ids=SPOILT)
def test_events_that_will_not_do_are_named_and_nothing_is_written(copy, capfd, spoil, flags, error):
    spoil(copy / "store")
    printed = refusal(capfd, copy, "--store", copy / "store", "--out", copy / "new", *flags)
    assert re.search(error.replace("{store}", str(copy / "store")), printed)
    assert printed.startswith("domainpar: error: ")
    assert not (copy / "new").exists()


def test_a_run_that_is_to_be_replaced_survives_a_new_one_that_is_refused(copy, capfd):
    event_file(copy / "store").unlink()
    refusal(capfd, copy, "--store", copy / "store", "--out", copy / "run", "--overwrite")


OUTPUTS = {
    "another run": ("run", [], "run holds another run\nhint: .*--out, .*--resume .*--overwrite"),
    "a store": ("store", [], "store holds other files\nhint: .*--out"),
    "a store to overwrite": ("store", ["--overwrite"], "event000000000.zarr.zip"),
    "a file": ("run/run.json", [], "{place}/run/run.json: Not a directory"),
    "nothing to resume": ("none", ["--resume"], "{place}/none holds no run"),
    "no run to resume": ("store", ["--resume"], "{place}/store holds no run"),
}


@pytest.mark.parametrize(("out", "flags", "error"), OUTPUTS.values(), ids=OUTPUTS)
def test_a_directory_that_belongs_to_something_else_is_left_alone(place, capfd, out, flags, error):
    printed = refusal(capfd, place, "--store", place / "store", "--out", place / out, *flags)
    assert re.search(error.replace("{place}", str(place)), printed)


def rewritten(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def spoilt_weights(run):
    (path,) = run.glob("checkpoints/step_*/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def half(run):
    """As a killed `cp` leaves it: YAML all the same, that says less."""
    lines = (run / "config.yaml").read_text().splitlines(keepends=True)
    (run / "config.yaml").write_text("".join(lines[: len(lines) // 2]))


RUNS = {
    "another width": (kept, "--hidden 32", "another network"),
    "more iterations": (kept, "--graph-iters 2", "another network"),
    "another order": (kept, "--model interaction-node-first", "another network"),
    "shared weights": (kept, "--shared-weights --graph-iters 2", "another network"),
    "another precision": (kept, "--dtype float64", "another network"),
    "damaged weights": (spoilt_weights, "", "model.safetensors .*sha256 "),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "", "no last checkpoint"),
    "a damaged run.json": (lambda run: (run / "run.json").write_text("{"), "", "run.json"),
    "no config.yaml": (
        lambda run: (run / "config.yaml").unlink(),
        "",
        "{run} .*config.yaml\nhint: copy it back",
    ),
    "half a config.yaml": (half, "", "{run}/config.yaml: .*\nhint: copy"),
    "an empty config.yaml": (lambda run: (run / "config.yaml").write_text(""), "", "config.yaml\nhint: copy it back"),
    "a config.yaml of before there were residuals": (
        lambda run: rewritten(run / "config.yaml", "residual: true\n", ""),
        "",
        "config.yaml .* residual .*\nhint: copy it back",
    ),
    "a strange config.yaml": (lambda run: rewritten(run / "config.yaml", "lr:", "rl:"), "", "unknown key rl"),
}


@pytest.mark.parametrize(("spoil", "flags", "error"), RUNS.values(), ids=RUNS)
def test_a_run_that_cannot_go_on_like_this_says_why_and_stays(copy, capfd, spoil, flags, error):
    spoil(copy / "run")
    before = contents(copy)
    assert exit_code(["--out", str(copy / "run"), "--resume", *flags.split()]) == 2
    out, err = capfd.readouterr()
    assert (out, contents(copy)) == ("", before)
    assert re.search(error.replace("{run}", str(copy / "run")), err)


@fault(12)
def test_half_a_configuration_is_refused_by_whoever_reads_it(copy, capfd):
    half(copy / "run")
    for command, argv in (
        (infer, ["--run", copy / "run"]),
        (report, [copy / "run"]),
        (export, [copy / "run"]),
        (train, ["--init", copy / "run", "--store", copy / "store", "--out", copy / "new"]),
        (train, ["--config", copy / "run" / "config.yaml", "--out", copy / "new"]),
    ):
        with contextlib.suppress(SystemExit):
            assert command.main(list(map(str, argv))) == 2
        err = capfd.readouterr().err
        assert f"{copy / 'run' / 'config.yaml'}" in err
        assert "hint: copy it" in err
    assert not (copy / "new").exists()


def test_a_run_does_not_go_on_with_other_events(place, tmp_path, capfd):
    other = write_random_store(tmp_path / "other", num_edges=600, compared=False)
    assert exit_code(["--out", str(place / "run"), "--resume", "--store", str(other)]) == 2
    assert "other events" in capfd.readouterr().err


def test_what_one_rank_finds_all_refuse_and_it_is_named(copy):
    overwritten_end(event_file(copy / "store"))
    config = TrainConfig(store=str(copy / "store"), out=str(copy / "new"), hidden=16)

    def refused(world):
        with pytest.raises(Refused) as error:
            train_on_ranks(config, copy / "store", world)
        return str(error.value)

    found = run_ranks(refused, 3, timeout=20)
    assert len(set(found)) == 1
    assert re.search(
        rf"BadZipFile.* \| event 000000001 \| rank 1/3 \| file {event_file(copy / 'store')}\nhint: ", found[0]
    )
    assert not (copy / "new").exists()


def test_an_event_with_a_flipped_bit_ends_one_process_with_two_lines(copy, capfd):
    for path in (copy / "store").glob("event*"):
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("nodes/features/c/0/0")
        content = bytearray(path.read_bytes())
        content[info.header_offset + 30 + len(info.filename) + info.file_size // 2] ^= 1
        path.write_bytes(content)
    assert exit_code(["--store", str(copy / "store"), "--out", str(copy / "new"), *SMALL]) == 1
    error, hint = capfd.readouterr().err.splitlines()
    assert re.search("nodes/features/c/0/0 is damaged: .* phase load$", error)
    assert "copy it anew" in hint


def test_events_of_its_own_that_train_cannot_prepare_are_told_with_the_flags_that_help(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stores").touch()
    assert exit_code(SMALL) == 2
    error, hint = capfd.readouterr().err.splitlines()
    assert "stores/simulate-20000: Not a directory" in error
    assert re.search("--store.*--out", hint)
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


def test_events_of_its_own_from_an_earlier_version_are_told_with_the_command_that_makes_them_anew(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert prepare.main(["--events", "3", "--hits", "600", "--store", "stores/simulate-20000"]) == 0
    manifest = tmp_path / "stores" / "simulate-20000" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 1}))
    capfd.readouterr()
    assert exit_code(SMALL) == 2
    error, hint = capfd.readouterr().err.splitlines()
    assert "other settings: " in error
    assert "python -m domainpar.prepare --overwrite" in hint


HITS = "hit_id,x,y,z,volume_id,layer_id,module_id\n1,32,1,5,8,2,1\n2,72,3,11,8,4,1\n3,116,5,18,8,6,1\n"
TRUTH = (
    "hit_id,particle_id,tx,ty,tz,tpx,tpy,tpz,weight\n1,7,32,1,5,1,0,0,.3\n2,7,72,3,11,1,0,0,.3\n3,7,116,5,18,1,0,0,.3\n"
)


@fault(27)
@pytest.mark.parametrize(
    ("with_truth", "lines"),
    [
        ((1, 2, 3), ["next: {started} -m domainpar.train --store '{store}'"]),
        (
            (2, 3),
            [
                "truth of edges: none in 1 of 3 events: 000000001",
                "next: {started} -m domainpar.train --store '{store}' --on-bad-event skip",
            ],
        ),
        (
            (),
            [
                "truth of edges: none in 3 of 3 events: 000000001, 000000002, 000000003",
                "next: {started} -m domainpar.infer --store '{store}'",
            ],
        ),
    ],
    ids=["all", "some", "none"],
)
def test_prepare_tells_which_events_have_no_truth_and_what_comes_next(tmp_path, capsys, with_truth, lines):
    for number in (1, 2, 3):
        (tmp_path / f"event{number:09d}-hits.csv").write_text(HITS)
        if number in with_truth:
            (tmp_path / f"event{number:09d}-truth.csv").write_text(TRUTH)
    store = tmp_path / "mit Umlaut: ä"
    assert prepare.main(["--source", "trackml", "--input", str(tmp_path), "--store", str(store)]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("truth of edges:", "next:"))]
    started = shlex.join([*on_ranks(), this_python()])
    assert printed == [line.format(started=started, store=store) for line in lines]


def test_a_preparation_that_fills_the_disk_has_failed_while_it_ran(tmp_path, monkeypatch, capfd):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--events", "1", "--hits", "500", "--store", str(tmp_path / "new")])
    assert ended.value.code == 1
    error, hint = capfd.readouterr().err.splitlines()
    assert "(errno 28) | rank 0/1 host " in error
    assert error.endswith(f" | file {tmp_path / 'new' / 'event000000000.zarr.zip'}")
    assert "--store" in hint


def launch(ranks, program, *flags):
    """Exit code and output of some ranks."""
    return run_command([MPIEXEC, "-n", str(ranks), sys.executable, *program, *SMALL, *map(str, flags)], timeout=60)


@needs_mpi
def test_two_processes_refuse_with_one_voice_and_exit_code_two(copy):
    overwritten_end(event_file(copy / "store", 1))
    before = contents(copy)
    code, printed = launch(2, ["-m", "domainpar.train"], "--store", copy / "store", "--out", copy / "new")
    assert code == 2
    printed = without_signs_of_life(printed)
    assert printed.startswith("domainpar: error: ")
    assert f" | event 000000001 | rank 1/2 | file {event_file(copy / 'store', 1)}\nhint: " in printed
    assert printed.count("\n") == 2
    assert contents(copy) == before


@needs_mpi
@pytest.mark.slow
def test_an_event_that_is_damaged_while_three_processes_train_ends_them_all_with_exit_code_one(copy):
    code, printed = launch(3, [PROGRAM], "--store", copy / "store", "--out", copy / "new", "--epochs", 1000)
    assert code == 1, printed
    assert "Traceback" not in printed
    assert printed.count("domainpar: error: cannot read ") == 1
    assert " | step 3 phase load\nhint: the file is damaged" in printed
    content = json.loads((copy / "new" / "run.json").read_text())
    assert content["state"] == "failed"
    assert "BadEvent: cannot read " in content["error"]
    assert "| event 00000000" in content["error"]
    assert "the file is damaged or incomplete" in content["error"]
    steps = [json.loads(line)["step"] for line in (copy / "new" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3
