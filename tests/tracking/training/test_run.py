"""A run from its first line to its last: what it writes, prints and leaves, however it ends."""

import json
import math
import re
import shutil
from pathlib import Path

import invariance
import pytest
import torch
from marks import fault, slow
from random_events import random_assignment, random_event
from random_store import NUM_TILES, write_graph, write_random_store
from safetensors.torch import load_file

from domainpar.common.agreement import Refused
from domainpar.common.words import this_python
from domainpar.parallel.signals import StopFlag
from domainpar.runs.checkpoint import optimizer_tensors
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.metrics import EDGE_METRICS
from domainpar.train import train

SMALL = {"hidden": 16, "graph_iters": 1, "epochs": 2, "lr": 1e-2}


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """A run of one rank that nothing disturbs, and the bits of its parameters."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run(store, out)[0][0]


class AskedInStep(StopFlag):
    """Asks a rank to stop in a step, counted from 1; 0: before the first; None: never."""

    def __init__(self, world, step):
        self._world, self._step = world, step

    @property
    def requested(self):
        mark = self._world.rank_status.last_mark
        return self._step == 0 or (mark is not None and (mark.phase, mark.step + 1) == ("optimizer", self._step))


def _run(world, store, out, flags, asked):
    """One run on a rank, which is asked to stop in the step that `asked` names for it; 0: before the first."""
    stop = AskedInStep(world, asked.get(world.rank))
    run = train(TrainConfig(**{**SMALL, **flags}, out=str(out)), store, world, stop=stop)
    world.transport.barrier()
    return invariance.parameters_of(run), run.state


def test_after_the_first_step_ranks_wait_for_each_other_as_long_as_timeout_says(store, tmp_path):
    def deadlines(world):
        train(TrainConfig(**SMALL, max_steps=1, timeout=17.5, out=str(tmp_path / "run")), store, world)
        return world.transport.deadline, world.domain.deadline

    assert run_ranks(deadlines, 4, domain_size=2, timeout=60) == [(17.5, 17.5)] * 4


def run(store, out, num_ranks=1, domain_size=None, asked=None, **flags):
    """Parameters and state of every rank after a run; `asked`: in which step which rank is asked to stop."""
    return run_ranks(_run, num_ranks, store, out, flags, asked or {}, domain_size=domain_size, timeout=60)


def lines(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def run_json(out):
    return json.loads((Path(out) / "run.json").read_text())


FIELDS = {
    *("split", "epoch", "step", "loss", "lr", "grad_norm", *(metric.name for metric in EDGE_METRICS)),
    *("counted_against", "edges", "edges_not_scored", "target_edges", "ranks"),
    *("seconds", "seconds_compute", "seconds_exchange", "seconds_wait", "seconds_load"),
    *("owned_nodes", "ghost_nodes", "local_edges", "halo_bytes", "peak_rss_bytes"),
}
LISTS = {
    "seconds_compute",
    "seconds_exchange",
    "seconds_wait",
    "seconds_load",
    "owned_nodes",
    "ghost_nodes",
    "local_edges",
    "halo_bytes",
    "peak_rss_bytes",
}


@pytest.mark.parametrize("flags", [{}, {"mode": "naive", "sectors": 3, "max_steps": 9}], ids=["halo", "naive"])
def test_every_line_of_the_metrics_has_every_field_and_one_value_a_rank_where_they_differ(store, tmp_path, flags):
    run(store, tmp_path / "run", num_ranks=2, warmup=4, **flags)
    written = lines(tmp_path / "run")
    assert {line["split"] for line in written} == {"train", "val"}
    last_of_epoch = {line["epoch"]: line["step"] for line in written if line["split"] == "train"}
    for line in written:
        trains = line["split"] == "train"
        noted = {"layers"} if trains and line["step"] == 1 else set()  # of the steps that are printed
        noted |= {"epoch_costs"} if trains and line["step"] == last_of_epoch[line["epoch"]] else set()
        assert set(line) == FIELDS | noted
        assert {name for name, value in line.items() if isinstance(value, list)} == LISTS
        assert all(len(line[name]) == 2 for name in LISTS)
        assert (line["grad_norm"] is None) == (line["split"] == "val")
        parts = [sum(line[f"seconds_{part}"][rank] for part in ("compute", "exchange", "wait")) for rank in range(2)]
        assert max(parts) == pytest.approx(line["seconds"])
        assert all(0 <= load <= line["seconds"] for load in line["seconds_load"])
    steps = [line["step"] for line in written if line["split"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["epoch"] for line in written] == ([0, 0, 0, 0, 1, 1, 1, 1] if not flags else [0] * 10)
    rates = [line["lr"] for line in written if line["split"] == "train"]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    before = None
    for line in written:
        assert line["split"] == "train" or line["lr"] == before, "a validation line has the rate of the step before it"
        before = line["lr"]


def test_bytes_of_the_halo_are_those_of_its_rows(store, tmp_path):
    """Forward: node states after one update. Backward: the gradient of one iteration's two sums."""
    run(store, tmp_path / "run", num_ranks=2, graph_iters=2)
    row = 16 * 4  # hidden float32 numbers
    trained = [line for line in lines(tmp_path / "run") if line["split"] == "train"]
    largest = max(line["edges"] for line in trained)
    for number, line in enumerate(trained):
        # In the first epoch parts are loaded, and ghosts asked for by their ids; but that of the largest event before.
        requests = 8 if number < 3 and line["edges"] < largest else 0
        assert sum(line["halo_bytes"]) == sum(line["ghost_nodes"]) * (row + 2 * row + requests)


@pytest.mark.parametrize("flags", [{}, {"mode": "naive", "sectors": 3}], ids=["halo", "naive"])
def test_a_store_with_one_event_is_trained_on_without_validation(tmp_path, flags):
    store = write_random_store(tmp_path / "store", num_train=1, num_val=0)
    (_, state), *_ = run(store, tmp_path / "run", num_ranks=2, **flags)
    assert state.step == (2 if not flags else 6)
    assert {line["split"] for line in lines(tmp_path / "run")} == {"train"}
    assert (state.best, run_json(tmp_path / "run")["state"]) == (None, "done")
    assert (tmp_path / "run" / "checkpoints" / "best").read_text() == f"step_{state.step:06d}\n"


SCREENS = {
    "halo": (1, None, {}),
    "naive, a sector to a tile": (1, None, {"mode": "naive", "sectors": 12}),
    "ranks without tiles": (8, None, {}),
    "ranks without events": (4, 1, {}),
}


@pytest.mark.parametrize(("num_ranks", "domain_size", "flags"), SCREENS.values(), ids=SCREENS)
def test_the_first_screen_is_twelve_lines_that_fit(store, tmp_path, monkeypatch, capsys, num_ranks, domain_size, flags):
    monkeypatch.chdir(tmp_path)
    Path("store").symlink_to(store)
    run(Path("store"), "runs/0001", num_ranks, domain_size, max_steps=2, **flags)
    printed = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(printed) if line.startswith("split=train"))
    assert first + 1 <= 12
    limit = 135 if flags else 120  # "approximate=yes" at the end of a line that is full already
    assert max(map(len, printed)) <= limit, max(printed, key=len)
    as_trained = "--mode naive --sectors 12 " if flags else ""  # scored otherwise, naive shows no loss at its borders
    assert printed[-1] == f"next: {this_python()} -m domainpar.infer --run runs/0001 {as_trained}--tracks greedy"
    assert printed[-3].endswith(": another number of ranks ends with the same")


@fault(5)
def test_more_ranks_than_tiles_run_and_it_is_said_who_owns_nothing(tmp_path, capsys):
    store = write_random_store(tmp_path / "store", num_tiles=3, compared=False)
    run(store, tmp_path / "run", num_ranks=5, domain_size=5, max_steps=1)
    said = capsys.readouterr().out
    assert "of 5 ranks own nothing" in said
    names = "|".join(record.event for record in EventStore(store).events("train"))
    assert re.search(f"no tile of ({names}) is theirs: fewer ranks, a smaller --domain-size or more tiles", said)
    assert 0 in lines(tmp_path / "run")[0]["owned_nodes"]


def test_groups_of_ranks_without_events_are_told_to_take_more_a_step(store, tmp_path, capsys):
    run(store, tmp_path / "run", num_ranks=2, domain_size=1, max_steps=2)
    said = capsys.readouterr().out
    assert said.count("1 of 2 ranks own nothing in training step 1 (1)") == said.count("in training step") == 1
    assert "): more --events-per-step, fewer ranks or a larger --domain-size" in said
    assert "smaller --domain-size" not in said


def test_a_validation_of_fewer_events_than_groups_is_named_and_called_no_problem_of_training(store, tmp_path, capsys):
    (validated,) = EventStore(store).events("val")
    run(store, tmp_path / "run", num_ranks=2, domain_size=1, events_per_step=2)
    said = capsys.readouterr().out.splitlines()
    notes = [number for number, line in enumerate(said) if line.startswith("note: ") and "validation" in line]
    (first,) = notes  # once, though each epoch ends with a validation
    assert said[first].startswith("note: 1 of 2 ranks own nothing in the validation after step 2 (1).")
    assert said[first + 1].endswith(f"1 sample ({validated.event}); training steps are not slower for it")


def test_a_step_that_takes_every_event_is_not_told_to_take_more(tmp_path, capsys):
    store = write_random_store(tmp_path / "store", num_train=1, num_val=0)
    run(store, tmp_path / "run", num_ranks=2, domain_size=1, max_steps=1)
    assert "): fewer ranks or a larger --domain-size" in capsys.readouterr().out


@fault(40)
@pytest.mark.parametrize("step", [slow(0), slow(1), 3, slow(5)])
def test_one_rank_that_is_asked_to_stop_stops_all_and_the_run_goes_on_to_the_same_bits(store, whole, tmp_path, step):
    """0: while the run was set up. 3: in the last step of an epoch, before its validation."""
    undisturbed, expected = whole
    stopped = run(store, tmp_path / "run", num_ranks=3, asked={1: step})
    assert [state.step for _, state in stopped] == [step] * 3
    content = run_json(tmp_path / "run")
    assert (content["state"], content["steps"]) == ("preempted", step)
    assert (tmp_path / "run" / "checkpoints" / "last").read_text() == f"step_{step:06d}\n"
    resumed = run(store, tmp_path / "run", num_ranks=2, resume=True)
    assert [parameters for parameters, _ in resumed] == [expected] * 2
    content = run_json(tmp_path / "run")
    assert (content["state"], content["steps"], content["ranks"], content["began_at_step"]) == ("done", 6, 2, step)
    told = [(line["split"], line["step"]) for line in lines(tmp_path / "run")]
    assert told == [(line["split"], line["step"]) for line in lines(undisturbed)]


def test_a_run_that_is_asked_to_stop_before_it_goes_on_stays_as_it_is(store, tmp_path):
    run(store, tmp_path / "run", max_steps=2)
    before = contents(tmp_path / "run" / "checkpoints")
    run(store, tmp_path / "run", num_ranks=2, asked={0: 0}, resume=True)
    assert run_json(tmp_path / "run")["state"] == "preempted"
    assert contents(tmp_path / "run" / "checkpoints") == before


OTHER_RANKS = {
    "another grouping": (2, None, {"grouping": "random"}),
    "another domain size": (4, 2, {}),
    "both, and several groups": (4, 1, {"grouping": "metis"}),
}


@fault(45)
@pytest.mark.parametrize(("num_ranks", "domain_size", "flags"), OTHER_RANKS.values(), ids=OTHER_RANKS)
def test_a_run_goes_on_with_another_grouping_or_domain_size_to_the_same_bits(
    store, whole, tmp_path, num_ranks, domain_size, flags
):
    _, expected = whole
    run(store, tmp_path / "run", num_ranks=2, asked={0: 4})
    resumed = run(store, tmp_path / "run", num_ranks, domain_size, resume=True, **flags)
    assert [parameters for parameters, _ in resumed] == [expected] * num_ranks


def grown(store, directory):
    """The store with a new event before, between and behind the others, all of them for training."""
    shutil.copytree(store, directory)
    records = EventStore(store).events()
    for place, name in ((0, "000"), (2, "0000000005"), (len(records) + 2, "9")):
        graph = random_event(7 + place, 60, 200, event_id=name)
        records.insert(
            place, write_graph(directory, graph, random_assignment(place, 60, NUM_TILES), NUM_TILES, "train")
        )
    write_manifest(directory, records, {})
    return directory


def test_a_run_goes_on_with_its_own_events_of_a_store_that_has_grown_to_the_same_bits(store, whole, tmp_path):
    undisturbed, expected = whole
    run(store, tmp_path / "run", asked={0: 2})
    resumed = run(grown(store, tmp_path / "grown"), tmp_path / "run", num_ranks=2, resume=True)
    assert [parameters for parameters, _ in resumed] == [expected] * 2
    last = "checkpoints/step_000006"
    assert contents(tmp_path / "run" / last) == contents(undisturbed / last)
    of_runs = [run_json(out)["store"] for out in (tmp_path / "run", undisturbed)]
    assert all(of_run["digest"] == EventStore(store).digest for of_run in of_runs)
    assert of_runs[0]["events"] == of_runs[1]["events"]
    assert [name for name, _ in of_runs[0]["events"]["train"]] == ["000000000", "000000001", "000000002"]


@pytest.mark.parametrize("changed", ["gone", "made anew"])
def test_a_run_that_lacks_one_of_its_events_names_it_and_what_the_store_holds(store, tmp_path, changed):
    run(store, tmp_path / "run", asked={0: 2})
    other = grown(store, tmp_path / "other")
    records = EventStore(other).events()
    place = next(number for number, record in enumerate(records) if record.event == "000000001")
    gone = records.pop(place)
    said = f"{other} does not hold event 000000001"
    if changed == "made anew":
        graph = random_event(99, 60, 200, event_id="000000001")
        records.append(write_graph(other, graph, random_assignment(1, 60, NUM_TILES), NUM_TILES, "train"))
        said = f"{other} holds event 000000001 with sha256 {records[-1].sha256[:12]}, then it was {gone.sha256[:12]}"
    write_manifest(other, records, {})
    before = contents(tmp_path / "run")
    with pytest.raises(Refused, match=f"{said} | event 000000001\nhint: .* it took them from {store}") as refused:
        run(other, tmp_path / "run", num_ranks=2, resume=True)
    assert said in str(refused.value)
    assert contents(tmp_path / "run") == before


def test_every_weights_that_were_saved_are_known_by_their_hash(store, tmp_path):
    run(store, tmp_path / "run", num_ranks=2)
    content = run_json(tmp_path / "run")
    assert list(content["saved"]) == ["3", "6"]
    assert content["saved"]["6"] == content["parameters_sha256"]


@fault(45)
def test_a_run_goes_on_in_another_mode_with_the_state_of_its_optimiser(store, tmp_path, monkeypatch):
    run(store, tmp_path / "run", asked={0: 3})
    held_by_rank = {}

    def step(self, samples, step, following=(), plain=Trainer.step):
        tensors = optimizer_tensors(self.model, self.optimizer)
        held_by_rank.setdefault(self.world.rank, {name: value.clone() for name, value in tensors.items()})
        return plain(self, samples, step, following)

    monkeypatch.setattr(Trainer, "step", step)
    saved = load_file(tmp_path / "run" / "checkpoints" / "step_000003" / "optimizer.safetensors")
    found = run(store, tmp_path / "run", 2, domain_size=1, mode="naive", sectors=2, resume=True)
    for rank, (_, state) in enumerate(found):
        held = held_by_rank[rank]
        assert held.keys() == saved.keys()
        assert all(torch.equal(held[name], saved[name]) for name in saved)
        assert {float(value) for name, value in held.items() if name.endswith(":step")} == {3.0}
        assert state.step == 12, "3 of 6 steps of the first epoch, then all others"
    ended = load_file(tmp_path / "run" / "checkpoints" / "step_000012" / "optimizer.safetensors")
    assert {float(value) for name, value in ended.items() if name.endswith(":step")} == {12.0}


class Broken(Exception):
    """What an unlucky rank raises."""


def break_in_step(monkeypatch, number, rank):
    """Let one rank fail in a step."""

    def step(self, samples, step, following=(), plain=Trainer.step):
        if step == number and self.world.rank == rank:
            raise Broken("no more memory")
        return plain(self, samples, step, following)

    monkeypatch.setattr(Trainer, "step", step)


def test_a_run_that_fails_says_so_and_goes_on_without_doing_steps_twice_in_its_metrics(
    store, whole, tmp_path, monkeypatch
):
    """It fails in step 5; the last checkpoint is of step 3, so lines of steps 4 and on are written anew."""
    _, expected = whole
    with monkeypatch.context() as patched:
        break_in_step(patched, number=4, rank=1)
        with pytest.raises(Broken):
            run(store, tmp_path / "run", num_ranks=2)
    content = run_json(tmp_path / "run")
    assert (content["state"], content["error"]) == ("failed", "rank 1: Broken: no more memory")
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_1.txt").read_text()
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 3, 4]
    resumed = run(store, tmp_path / "run", num_ranks=2, resume=True)
    assert resumed[0][0] == expected
    assert "error" not in run_json(tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 3, 4, 5, 6, 6]


def test_a_run_that_has_nothing_left_to_do_says_what_would_go_on(store, tmp_path, capsys):
    run(store, tmp_path / "run", epochs=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    run(store, tmp_path / "run", epochs=1, resume=True)
    assert "--epochs or --max-steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_checkpoints_every_n_steps_are_kept_besides_those_of_epochs(store, tmp_path):
    run(store, tmp_path / "run", epochs=1, checkpoint_every=2)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")) == [
        "step_000002",
        "step_000003",
    ]


def test_a_loss_that_is_not_finite_stops_all_ranks_before_any_parameter_changes(store, tmp_path):
    with pytest.raises(RuntimeError, match=r"not finite: first in layer node_encoder \(forward\) \| event 00000000\d"):
        run(store, tmp_path / "run", num_ranks=2, lr=1e30)
    content = run_json(tmp_path / "run")
    assert content["state"] == "failed"
    assert content["error"].startswith("rank 0: StepFailed: the loss or a gradient is not finite: first in")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1]


def test_a_validation_loss_that_is_not_finite_is_none_and_never_the_best(store, tmp_path, monkeypatch):
    def evaluate(self, samples, step, plain=Trainer.evaluate):
        bias = self.model.head.mlp.linears[-1].bias.data
        kept = bias.clone()
        bias.fill_(math.inf)
        record = plain(self, samples, step)
        bias.copy_(kept)
        return record

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    (_, state), *_ = run(store, tmp_path / "run", epochs=1)
    assert [line["loss"] for line in lines(tmp_path / "run") if line["split"] == "val"] == [None]
    assert state.best is None


def test_a_directory_is_touched_only_when_everything_else_is_known_to_be_good(tmp_path):
    """A run that is to be replaced stays if the new one cannot begin."""
    store = write_random_store(tmp_path / "store", num_train=1, num_val=0)
    run(store, tmp_path / "run", epochs=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for flags, error in (
        ({"target": "pT: [1, .inf]"}, "target condition on 'pT', which is unknown"),
        ({"target": "pt: [2, 1]"}, "empty interval"),
    ):
        with pytest.raises(Refused, match=f"{error}.*event 000000000.*file .*zip"):
            run(store, tmp_path / "run", num_ranks=2, overwrite=True, **flags)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("interaction", {"forward": 2, "backward": 2, "sums": 0}),
        ("interaction-node-first", {"forward": 3, "backward": 3, "sums": 0}),
        ("acorn", {"forward": 3, "backward": 3, "sums": 0}),
    ],
)
def test_the_number_of_exchanges_is_told_and_minimal(store, tmp_path, capsys, model, expected):
    run(store, tmp_path / "run", num_ranks=2, model=model, graph_iters=3, max_steps=1)
    assert run_json(tmp_path / "run")["exchanges"] == expected
    assert f"exchanges: {expected['forward']} in the forward pass" in capsys.readouterr().out
