"""The facts of a run: its configuration, how it ended, its final metrics, and how to do it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domainpar.common.words import exactness_text, its_mpiexec, several, some_of, this_python
from domainpar.parallel.launcher import detect
from domainpar.runs.directory import figure_of
from domainpar.runs.records import RunRecord, StoreRecord, Table
from domainpar.tracking.cost.epoch_words import in_words, mean_epoch
from domainpar.tracking.display.run_files import SPLITS, RunFiles
from domainpar.tracking.events.own_events import training_overlap
from domainpar.tracking.training.metrics import EDGE_METRICS, LABEL_METRICS, Metric

STATES = {
    "done": "done",
    "preempted": "stopped on request, with a checkpoint",
    "running": "under way when this was written, or killed",
    "failed": "failed",
    "starting": "had not begun",
    "died": "ended without a word, as a killed process does",
}

LAST, BEST = "in training, last", "in training, best"
"""The two validations that are shown: the last, and that of the best checkpoint."""


@dataclass(frozen=True)
class ReportTable:
    """A table of the report."""

    head: tuple[str, ...]  # headings; none for a table of facts
    rows: tuple[tuple[str, ...], ...]  # its cells
    note: str = ""  # a remark below it
    words: int = 1  # number of columns, the first ones, that hold words; the others hold numbers
    numbers: tuple[tuple[object, ...], ...] = ()  # what it is made of, as lines of `html.HEADING`
    meanings: Mapping[str, str] = field(default_factory=dict)  # of headings: shown to who points at them

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, str]],
        note: str = "",
        words: int = 1,
        numbers: Sequence[tuple[object, ...]] = (),
        meanings: Mapping[str, str] | None = None,
    ) -> tuple[ReportTable, ...]:
        """The table of some rows, each its cells by the headings; no table of no rows."""
        cells = tuple(tuple(row.values()) for row in rows)
        return (cls(tuple(rows[0]), cells, note, words, tuple(numbers), meanings or {}),) if rows else ()


def facts(run: RunFiles) -> ReportTable:
    """Network, events, duration, machine and exactness of a run; only what its files hold."""
    record, settings = run.record, run.settings
    records = run.records_of("train")
    steps, of_ranks = f"{record.steps:,}" if record.steps else "none", ""
    if records:
        epochs = f" of {settings['epochs']}" if settings.get("epochs") else ""
        steps = f"{records[-1]['step']:,}, in epoch {int(records[-1].get('epoch', 0)) + 1}{epochs}"
    if record.ranks:
        threads = several(record.threads or 1, "thread")
        of_ranks = f"{several(record.ranks, 'rank')}, {record.domain_size} per event, {threads} each"
        of_ranks += f", on {settings['device']}" if settings.get("device") else ""
    events = ""
    if run.own is not None:
        events = f": {several(len(run.own.train), 'event')}, and {len(run.own.val)} to validate with"
    time, seconds = "", record.seconds
    if isinstance(seconds, int | float) and math.isfinite(seconds):
        hours, minutes = divmod(round(seconds / 60), 60)
        time = f"{seconds:.0f} s" if seconds < 120 else f"{hours} h {minutes} min" if hours else f"{minutes} min"
    mean = mean_epoch([record["epoch_costs"] for record in records if record.get("epoch_costs")])
    mode = "halo: whole events, split over the ranks, which exchange what they need of each other"
    if run.approximate:
        sectors = settings.get("sectors")
        mode = f"naive: APPROXIMATE. {sectors} independent sectors of an event; edges between them are dropped"
    scored = ""
    if run.scores is not None:
        by = run.scores.record
        left = "" if by.filter is None else f", edges that filter {by.filter['run']} left"
        elsewhere = "" if by.store_digest == record.store.digest else f", of {_store(by.store, by.store_digest)}"
        scored = f"{several(len(run.scores.events), 'event')}{left}, {run.how_scored}, "
        scored += f"{by.checkpoint} checkpoint (step {by.step}){elsewhere}"
        scored = "; ".join([scored, *(training_overlap(by.trained_on) if "trained_on" in by.content else [])])
    exactness = exactness_text(record.bitwise_problem)
    if run.approximate:
        exactness = f"of sectors, not of whole events: approximate; {exactness}"
    facts = {
        "state": STATES.get(record.state, record.state) + (f": {record.error}" if record.error else ""),
        "mode": mode,
        "network": _network(record, settings),
        "parameters": f"sha256 {record.parameters_sha256[:16]}" if record.parameters_sha256 else "",
        "trained on": f"{_store(record.store)}{events}" if record.store.content else "",
        "target particles": run.target or "every particle",
        "left out": _left_out(run),
        "steps": steps,
        "time": time,
        "per epoch": "" if mean is None else in_words(mean),
        "ranks": of_ranks,
        "precision": str(settings.get("dtype") or "")
        + (", edges in bf16" if settings.get("precision") == "bf16" else ""),
        "exactness": exactness if "bitwise_problem" in record.content else "",
        "scored": scored,
        "started": record.started,
        "machine": ", ".join(filter(None, (record.host, record.machine))),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items() if version),
    }
    return ReportTable((), tuple((name, text) for name, text in facts.items() if text))


def final_metrics(run: RunFiles, other: RunFiles | None = None) -> tuple[ReportTable, ...]:
    """Metrics of each split: of the scores, or else of the last validation; no table where there are none.

    Beside another run those of its last and of its best validation, then of the scores: one run below the other.
    """
    own = _counted(run)
    if other is None:
        counted = [of for name, of in own.items() if name not in (LAST, BEST)] or [*own.values()][:1]
    else:
        both = own, _counted(other)
        counted = [rows[name] for name in (LAST, BEST, *SPLITS) for rows in both if name in rows]
    with_loss = any(values.get("loss") is not None for _, values in counted)
    edges = [
        {
            **where,
            **({"loss": short(values.get("loss"))} if with_loss else {}),
            **{metric.heading: _cell(metric, values) for metric in EDGE_METRICS},
            "target edges": f"{values.get('target_edges') or 0:,}",
        }
        for where, values in counted
        if values.get("edges")
    ]
    labels = [
        {
            **where,
            "label": label,
            "known": f"{figures.get('known') or 0:,}",
            **{metric.heading: short(figures.get(metric.name)) for metric in LABEL_METRICS},
        }
        for where, values in counted
        for label, figures in values.get("labels", {}).items()
    ]
    meanings = {metric.heading: metric.meaning for metric in (*EDGE_METRICS, *LABEL_METRICS)}
    of_edges = ReportTable.of(edges, words=3, meanings=meanings)
    return of_edges + ReportTable.of(labels, words=4, meanings=meanings)


def _cell(metric: Metric, values: Table) -> str:
    """A metric of edges. Training pools the edges of all events, `infer` keeps those of one at a time."""
    if not metric.mean:
        return short(values.get(metric.name))
    words = {metric.name: "pooled", metric.mean: "mean over events"}
    return "".join(f"{short(values[name])} {how}" for name, how in words.items() if name in values)


def _counted(run: RunFiles) -> dict[str, tuple[dict[str, str], Table]]:
    """The last validation and the best, `LAST` and `BEST`, and each split that was scored: how each was counted, and
    its metrics."""
    counted: dict[str, tuple[dict[str, str], Table]] = {}
    if records := run.records_of("val"):
        main = (run.record.tasks or {}).get("main", "edge")
        # As training takes them: the first of equal ones, and without any figure the newest.
        figures = [-math.inf if (figure := figure_of(record, main)) is None else figure for record in records]
        best = records[figures.index(max(figures)) if max(figures) > -math.inf else -1]
        for which, record in ((LAST, records[-1]), (BEST, best)):
            how = run.called(f"{run.how_trained}, step {record['step']}", "training")
            counted[which] = {"split": "val", "how": how, "counted in the graph": which}, record
    for split, of in (run.scores.record.metrics if run.scores else {}).items():
        events = several(int(of["events"]), "event")
        counted[split] = {"split": split, "how": run.called(run.how_scored), "counted in the graph": events}, of
    return counted


def command(run: RunFiles) -> str:
    """The command that does the same again, from the run's own configuration, into another directory."""
    record, ranks = run.record, run.record.ranks or 1
    words = [this_python(), "-m", "domainpar.train", "--config", str(run.directory / "config.yaml")]
    words += ["--model", record.model_code] if record.model_code else []
    words += ["--optimizer", record.optimizer_code] if record.optimizer_code else []
    # `.` and `..` have no name that "-again" could be put behind.
    directory = run.directory if run.directory.name not in ("", "..") else run.directory.resolve()
    words += ["--out", str(directory.with_name(f"{directory.name}-again"))]
    launcher = [its_mpiexec(), "-n", str(ranks)] if ranks != 1 else []
    return shlex.join(launcher + words)


def started_as(run: RunFiles) -> str | None:
    """The command that started the run, behind the launcher that its environment shows; None where it is not kept."""
    argv = run.record.argv
    if not argv:
        return None
    words = ["python"]
    with suppress(ValueError):  # an environment that no launcher leaves
        launcher = detect({str(name): str(value) for name, value in run.record.environment.items()})
        if launcher.kind == "torchrun":
            words = ["torchrun", "..."]  # its environment does not hold the number of machines
        elif launcher.command in ("mpiexec", "srun"):
            words = [launcher.command, "-n", str(launcher.size), "python"]
    return shlex.join([*words, "-m", f"domainpar.{Path(str(argv[0])).stem}", *map(str, argv[1:])])


def _network(record: RunRecord, settings: Table) -> str:
    if not settings:
        return ""
    model = record.model_code or settings.get("model")
    shown = {
        "hidden": f", width {settings.get('hidden')}",
        "graph_iters": f", {settings.get('graph_iters')} iterations",
        "shared_weights": ", shared weights" if settings.get("shared_weights") else "",
        "dropout": f", dropout {settings['dropout']}" if settings.get("dropout") else "",
    }
    options = record.model_options
    used = {"shared_weights", *(shown if options is None else options)}  # a user's own network may take none
    return f"{model}" + "".join(text for name, text in shown.items() if name in used)


def _left_out(run: RunFiles) -> str:
    """Events that training or inference left out since they could not be used; empty if none were."""
    texts: list[str] = []
    scored = run.scores.record.skipped if run.scores else ()
    for work, entries, name in (("in training", run.record.skipped, "sample"), ("in scoring", scored, "event")):
        skipped = [str(entry.get(name)) for entry in entries]
        if skipped:
            texts.append(f"{several(len(skipped), name)} {work}: {some_of(skipped)}")
    return "; ".join(texts) + (" (could not be used)" if texts else "")


def not_trained_here(run: RunFiles) -> tuple[str, ...]:
    """A sentence on where the network comes from, if it was not trained in this directory; else nothing."""
    record = run.record
    if record.imported is not None:
        whence = f"{record.imported['framework']} trained it, and it was imported"
    elif record.store.content and not record.argv:
        whence = "it is shipped with domainpar, and the events of its training are not here"
    else:
        return ()
    return (f"This network was not trained here: {whence}. There is nothing to show of ranks and of their times.",)


def _store(kept: StoreRecord, digest: str | None = None) -> str:
    """A store by its name and digest."""
    return f"{kept.absolute or kept.path or 'a store that is not here'}, digest {str(digest or kept.digest)[:16]}"


def short(value: Any) -> str:
    """A rate for a table; a dash where there was nothing to divide by."""
    return f"{value:.4f}" if isinstance(value, int | float) else "–"


def percent(share: float | None) -> str:
    """A share for a table; a dash where there was nothing to divide by."""
    return "–" if share is None else f"{share:.2%}"
