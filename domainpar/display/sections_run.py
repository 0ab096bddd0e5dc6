"""Sections about the run itself: what it was, how the training went, and where its time went."""

from __future__ import annotations

from domainpar.display import summary
from domainpar.display.curves import training_curves
from domainpar.display.efficiency import how_scored, how_trained
from domainpar.display.figures_ranks import rank_figures
from domainpar.display.figures_training import training_figures
from domainpar.display.ranks import PHASES, RankTimes, rank_times
from domainpar.display.reading import RunFiles
from domainpar.display.sections import Section, approximate
from domainpar.display.summary import Rows
from domainpar.words import several, this_python


def about_run(run: RunFiles, other: RunFiles | None) -> Section:
    """What the run was, how it ended, and how to do it again."""
    metrics = summary.final_metrics(run, other)
    commands = [("Train the same again", summary.command(run))]
    if started := summary.started_as(run):
        commands.append(("It was started with", started))
    lead = []
    if other is not None:
        lead.append(f"Compared with {other.directory}: {how_scored(other)}.")
        if other.approximate and other.scores is not None and not other.scores.approximate:
            lead.append(
                "To see what sectors lose at their borders, score it as it was trained: "
                f"{this_python()} -m domainpar.infer --run {other.directory} --mode naive "
                f"--sectors {other.settings.get('sectors')} --tracks walk --overwrite"
            )
    return Section(
        "summary",
        "Run",
        tuple(lead),
        approximate(run, other),
        tables=(summary.facts(run), *([metrics] if metrics else [])),
        commands=tuple(commands),
    )


def training(run: RunFiles, other: RunFiles | None) -> Section:
    """Loss, metrics and learning rate along the steps."""
    title = "Training"
    theirs = (training_curves(other), how_trained(other)) if other else (None, "")
    figures = training_figures(training_curves(run), *theirs)
    if not figures:
        return Section("training", title, absent="No step was finished yet.")
    against = (run.records_of("train") or run.records_of("val") or [{}])[-1].get("counted_against")
    lead = f"Edge metrics are counted in the graph: against {against or 'candidate edges'}. "
    lead += "A true segment that no candidate edge joins is in none of these numbers."
    return Section("training", title, (lead,), approximate(run, other), figures=tuple(figures))


def ranks(run: RunFiles) -> Section:
    """Time and memory of each rank, and the times of the inference."""
    times = rank_times(run)
    if times is None:
        return Section("ranks", "Time and memory", absent="No step of the training was finished.")
    tables = [_rank_table(times)]
    if inference := _inference(run):
        tables.append(inference)
    lead = (
        f"{several(times.num_ranks, 'rank')}; a step takes {times.step_seconds:.3g} s (median of the slowest rank). "
        f"Imbalance: {times.node_imbalance:.3f} in hits, {times.compute_imbalance:.3f} in computing time."
    )
    if times.other_sizes:
        lead += f" {several(times.other_sizes, 'earlier step')} on another number of ranks are not in it."
    return Section("ranks", "Time and memory", (lead,), tables=tuple(tables), figures=tuple(rank_figures(times)))


def _rank_table(times: RankTimes) -> Rows:
    rows = tuple(
        (
            str(rank),
            *(f"{times.phases[phase][rank]:.4g} s" for phase in PHASES),
            f"{times.owned[rank]:,.0f}",
            f"{times.ghosts[rank]:,.0f}",
            f"{times.halo_bytes[rank] / 2**20:.2f} MiB",
            f"{times.peak_bytes[rank] / 2**20:,.0f} MiB",
        )
        for rank in range(times.num_ranks)
    )
    head = ("rank", "computing", "handing on", "waiting", "hits owned", "ghosts", "sent in a step", "peak memory")
    return Rows(head, rows)


def _inference(run: RunFiles) -> Rows | None:
    if run.scores is None or run.scores.timings is None:
        return None
    events = run.scores.timings.get("events") or []
    names = ("seconds_network", "seconds_tracks", "seconds_all")
    rows = tuple(
        (
            str(event.get("event")),
            *(f"{event[name]:.3g} s" if event.get(name) is not None else "–" for name in names),
            *(f"{event[name]:,}" if event.get(name) is not None else "–" for name in ("hits", "edges", "tracks")),
        )
        for event in events[:12]
    )
    head = ("event", "network", "tracks", "all", "hits", "edges", "tracks found")
    more = f", the first {len(rows)} of {several(len(events), 'event')}" if len(rows) < len(events) else ""
    note = f"Inference on {several(int(run.scores.timings.get('ranks') or 1), 'rank')}{more}."
    return Rows(head, rows, note) if rows else None
