"""The facts of a run: its configuration, how it ended, its final metrics, and how to do it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domainpar.common.words import its_mpiexec, several, this_python
from domainpar.parallel.launcher import detect
from domainpar.runs.directory import figure_of
from domainpar.tracking.display.run_files import SPLITS, RunFiles, Table
from domainpar.tracking.events.own_events import told_of
from domainpar.tracking.training.monitor.prices import in_words, mean_epoch

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

AREAS = {"edge_auc_pooled": "pooled", "edge_auc_mean": "mean over events"}
"""Words for the two areas under the ROC curve: that of training, and that of `infer`."""


@dataclass(frozen=True)
class Rows:
    """A table of the report.

    Attributes:
        head: Headings; none for a table of facts.
        rows: Its cells.
        note: A remark below it.
        words: Number of columns, the first ones, that hold words; the others hold numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: int = 1

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], note: str = "", words: int = 1) -> tuple[Rows, ...]:
        """The table of some rows, each its cells by the headings; no table of no rows."""
        return (cls(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), note, words),) if rows else ()


def facts(run: RunFiles) -> Rows:
    """Network, events, duration, machine and promise of a run; only what its files hold."""
    about, settings = run.about, run.settings
    state, ranks, kept = str(about.get("state") or "unknown"), about.get("ranks"), _mapping(about, "store")
    records = run.records_of("train")
    steps, of_ranks = "none", ""
    if records:
        epochs = f" of {settings['epochs']}" if settings.get("epochs") else ""
        steps = f"{records[-1]['step']:,}, in epoch {int(records[-1].get('epoch', 0)) + 1}{epochs}"
    if ranks:
        threads = several(int(about.get("threads") or 1), "thread")
        of_ranks = f"{several(int(ranks), 'rank')}, {about.get('domain_size')} to an event, {threads} each"
        of_ranks += f", on {settings['device']}" if settings.get("device") else ""
    events = ""
    if run.own is not None:
        events = f": {several(len(run.own.train), 'event')}, and {len(run.own.val)} to validate with"
    mode = "halo: whole events, split over the ranks, which exchange what they need of each other"
    if run.approximate:
        sectors = settings.get("sectors")
        mode = f"naive: APPROXIMATE. {sectors} independent sectors of an event, edges between them dropped"
    facts = {
        "state": STATES.get(state, state) + (f": {about['error']}" if about.get("error") else ""),
        "mode": mode,
        "network": _network(about, settings),
        "parameters": f"sha256 {about['parameters_sha256'][:16]}" if about.get("parameters_sha256") else "",
        "trained on": f"{_store(kept)}{events}" if kept else "",
        "target particles": run.target or "every particle",
        "left out": _left_out(run),
        "steps": steps,
        "time": _duration(about.get("seconds")),
        "an epoch": _epoch(records),
        "ranks": of_ranks,
        "precision": str(settings.get("dtype") or "")
        + (", edges in bf16" if settings.get("precision") == "bf16" else ""),
        "exactness": _exactness(run),
        "scored": _scored(run),
        "started": str(about.get("started") or ""),
        "machine": ", ".join(str(about[name]) for name in ("host", "machine") if about.get(name)),
        "versions": ", ".join(f"{name} {version}" for name, version in _mapping(about, "versions").items() if version),
    }
    return Rows((), tuple((name, text) for name, text in facts.items() if text))


def _epoch(records: Sequence[Table]) -> str:
    """What the training steps of an epoch cost on average; empty in runs that did not count."""
    mean = mean_epoch([record["epoch_costs"] for record in records if record.get("epoch_costs")])
    return "" if mean is None else in_words(mean)


def final_metrics(run: RunFiles, other: RunFiles | None = None) -> tuple[Rows, ...]:
    """Metrics of each split: of the scores, or else of the last validation; no table where there are none.

    Beside another run those of its last and of its best validation, then of the scores: one run below the other.
    """
    if other is None:
        counted = [*_of_scores(run).values()] or [*_of_validations(run).values()][:1]
    else:
        both = [_of_validations(each) | _of_scores(each) for each in (run, other)]
        counted = [rows[name] for name in (LAST, BEST, *SPLITS) for rows in both if name in rows]
    with_loss = any(values.get("loss") is not None for _, values in counted)
    edges = [
        {
            **where,
            "edge efficiency": short(values.get("edge_efficiency")),
            "edge purity": short(values.get("edge_purity")),
            **({"loss": short(values.get("loss"))} if with_loss else {}),
            # Training pools the edges of all events, `infer` keeps those of one at a time.
            "edge AUC": "".join(f"{short(values[name])} {word}" for name, word in AREAS.items() if name in values),
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
            "accuracy": short(figures.get("accuracy")),
            "mean of classes": short(figures.get("mean_accuracy")),
            "RMSE": short(figures.get("rmse")),
            "R^2": short(figures.get("r2")),
        }
        for where, values in counted
        for label, figures in values.get("labels", {}).items()
    ]
    return *Rows.of(edges, words=3), *Rows.of(labels, words=4)


def _of_validations(run: RunFiles) -> dict[str, tuple[dict[str, str], Table]]:
    """The last validation and the best, `LAST` and `BEST`: how each was counted, and its metrics; none before one."""
    records = run.records_of("val")
    if not records:
        return {}
    main = _mapping(run.about, "tasks").get("main", "edge")
    # As training takes them: the first of equal ones, and without any figure the newest.
    figures = [-math.inf if (figure := figure_of(record, main)) is None else figure for record in records]
    best = records[figures.index(max(figures)) if max(figures) > -math.inf else -1]
    return {
        which: (_where("val", run.called(f"{run.how_trained}, step {record['step']}", "training"), which), record)
        for which, record in ((LAST, records[-1]), (BEST, best))
    }


def _of_scores(run: RunFiles) -> dict[str, tuple[dict[str, str], Table]]:
    """Each split that was scored: how it was counted, and the metrics; nothing without scores."""
    metrics: Table = (run.scores.about.get("metrics") if run.scores else None) or {}
    return {
        split: (_where(split, run.called(run.how_scored), several(int(of["events"]), "event")), of)
        for split, of in metrics.items()
    }


def _where(split: str, how: str, counted: str) -> dict[str, str]:
    return {"split": split, "how": how, "counted in the graph": counted}


def command(run: RunFiles) -> str:
    """The command that does the same again, from the run's own configuration, into another directory."""
    model = run.about.get("model_code")
    ranks = run.about.get("ranks") or 1
    words = [this_python(), "-m", "domainpar.train", "--config", str(run.directory / "config.yaml")]
    words += ["--model", str(model)] if model else []
    # `.` and `..` have no name that "-again" could be put behind.
    directory = run.directory if run.directory.name not in ("", "..") else run.directory.resolve()
    words += ["--out", str(directory.with_name(f"{directory.name}-again"))]
    launcher = [its_mpiexec(), "-n", str(ranks)] if ranks != 1 else []
    return shlex.join(launcher + words)


def started_as(run: RunFiles) -> str | None:
    """The command that started the run, behind the launcher that its environment shows; None where it is not kept."""
    argv = run.about.get("argv")
    if not isinstance(argv, list) or not argv:
        return None
    words = ["python"]
    with suppress(ValueError):  # an environment that no launcher leaves
        launcher = detect({str(name): str(value) for name, value in _mapping(run.about, "environment").items()})
        if launcher.kind == "torchrun":
            words = ["torchrun", "..."]  # its environment does not hold the number of machines
        elif launcher.command in ("mpiexec", "srun"):
            words = [launcher.command, "-n", str(launcher.size), "python"]
    return shlex.join([*words, "-m", f"domainpar.{Path(str(argv[0])).stem}", *map(str, argv[1:])])


def _network(about: Table, settings: Table) -> str:
    if not settings:
        return ""
    model = about.get("model_code") or settings.get("model")
    shown = {
        "hidden": f", width {settings.get('hidden')}",
        "graph_iters": f", {settings.get('graph_iters')} iterations",
        "shared_weights": ", shared weights" if settings.get("shared_weights") else "",
        "dropout": f", dropout {settings['dropout']}" if settings.get("dropout") else "",
    }
    options = about.get("model_options")
    used = {"shared_weights", *(shown if options is None else options)}  # a user's own network may take none
    return f"{model}" + "".join(text for name, text in shown.items() if name in used)


def _left_out(run: RunFiles) -> str:
    """Events that training or inference left out since they could not be used; empty if none were."""
    texts: list[str] = []
    scored = run.scores.about if run.scores else {}
    for work, about, name in (("in training", run.about, "sample"), ("in scoring", scored, "event")):
        skipped = [str(entry.get(name)) for entry in about.get("skipped") or () if isinstance(entry, dict)]
        if skipped:
            names = ", ".join(skipped[:4]) + (", ..." if len(skipped) > 4 else "")
            texts.append(f"{several(len(skipped), name)} {work}: {names}")
    return "; ".join(texts) + (" (could not be used)" if texts else "")


def _store(kept: Table) -> str:
    """A store by its name and digest."""
    return f"{kept.get('absolute') or kept.get('path')}, digest {str(kept.get('digest'))[:16]}"


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return ""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _exactness(run: RunFiles) -> str:
    if "bitwise_problem" not in run.about:
        return ""
    naive = "of sectors, not of whole events: approximate; " if run.approximate else ""
    if problem := run.about["bitwise_problem"]:
        return f"{naive}the answer of any number of ranks to rounding only: {problem}"
    return f"{naive}the same bits on any number of ranks (self-test passed)"


def _scored(run: RunFiles) -> str:
    if run.scores is None:
        return ""
    about, store = run.scores.about, run.scores.store
    other = "" if store.get("digest") == _mapping(run.about, "store").get("digest") else f", of {_store(store)}"
    text = (
        f"{several(len(run.scores.events), 'event')}, {run.how_scored}, {about.get('checkpoint')} checkpoint "
        f"(step {about.get('step')}){other}"
    )
    return "; ".join([text, *(told_of(about["trained_on"]) if "trained_on" in about else [])])


def short(value: Any) -> str:
    """A rate for a table; a dash where there was nothing to divide by."""
    return f"{value:.4f}" if isinstance(value, int | float) else "–"


def percent(share: float | None) -> str:
    """A share for a table; a dash where there was nothing to divide by."""
    return "–" if share is None else f"{share:.2%}"


def _mapping(about: Table, name: str) -> Mapping[str, Any]:
    value = about.get(name)
    return value if isinstance(value, dict) else {}
