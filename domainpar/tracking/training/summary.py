"""The printed lines of a run: plain text of at most 120 characters, made on rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from domainpar.common.words import between, byte_size, several, some_of, this_python
from domainpar.measure.forecast import Forecast
from domainpar.nn.program import means_of
from domainpar.parallel.world import World
from domainpar.tracking.config import CODE, NetworkFlags, flag, is_code
from domainpar.tracking.config.train import TrainedFlags, TrainingFlags
from domainpar.tracking.networks.catalogue import options_of
from domainpar.tracking.training.inputs import TrainingData
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.sampler import Sample, deal
from domainpar.tracking.training.tasks import task_lines
from partitioners import number_of_sectors

WIDEST = 120  # of a printed line
SQUASHED = "WARNING: every output of the network lay in 0..1. Logits are expected: return what goes into a last sigmoid"


def first_lines(
    config: TrainedFlags, training_data: TrainingData, trainer: Trainer, allocator: str | None
) -> list[str]:
    """The ranks, the events and the network; `allocator`: the set-up of the C library's, None if there is none."""
    world, store = trainer.world, training_data.store
    records = store.events("train") + store.events("val")
    edges, tiles = [record.num_edges for record in records], [record.num_tiles for record in records]
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    used = options_of(config.model)
    sizes = f"hidden {config.hidden}, " if "hidden" in used else ""
    sizes += f"{several(config.graph_iters, 'iteration')}, " if "graph_iters" in used else ""
    sizes += "standardised features, " if config.standardises else ""
    samples = several(len(training_data.train), "event" if config.mode == "halo" else "sector")
    lines = [
        ranks_line(world),
        f"events   : {store.path}",
        f"           {samples} to train on, {len(training_data.val)} to validate with; "
        f"{between(edges, 'candidate edge')} in {between(tiles, 'tile')}",
        f"network  : {config.model}, {sizes}{num_parameters:,} parameters, {config.dtype}"
        + (" with edges in bf16" if config.precision == "bf16" else ""),
    ]
    lines += task_lines(training_data.tasks)
    # Flags of the network that a network of the user's own does not take.
    unused = [
        f"{flag(name)} {getattr(config, name)}"
        for name in ("hidden", "graph_iters", "dropout")
        if is_code(config.model) and name not in used and getattr(config, name) != getattr(NetworkFlags, name)
    ]
    lines += [f"WARNING: {config.model} does not take {', '.join(unused)}: nothing changes by it"] if unused else []
    if config.mode == "naive":
        number = number_of_sectors(config.sectors or 0)
        sectors = several(number, "sector")
        grid = "" if isinstance(config.sectors, int) else f" ({config.sectors} in phi x eta)"
        lines.append(f"naive    : APPROXIMATE: {sectors} per event{grid}; edges between them are dropped")
    return lines if allocator is None else [*lines, f"allocator: {allocator}"]


def ranks_line(world: World) -> str:
    """The ranks of a program, its first line."""
    return (
        f"domainpar: {several(world.size, 'rank')} over {world.transport.name}, {world.domain.size} per event, "
        f"{means_of(world.device)} each"
    )


def memory_expected(
    forecast: Forecast | None, smaller: str = ", a smaller --hidden or fewer --graph-iters"
) -> list[str]:
    """The expected memory of the run and the part it is for, with a warning where there is less.

    `smaller`: Besides more ranks, what takes less.
    """
    if forecast is None:
        return ["memory   : not predicted for this network; the end of the run shows what it took"]
    rank = forecast.fullest
    share, num_ranks = forecast.shares[rank], len(forecast.shares)
    who = "" if num_ranks == 1 else f" on the fullest of {num_ranks} ranks (rank {rank})"
    nodes = f" and {several(share.owned, 'node')}"
    if num_ranks > 1:
        nodes = f", {several(share.owned, 'node')} and {several(share.ghosts, 'ghost node')}"
    every = forecast.recompute_every
    how = "" if every is None else f", with --recompute-every {every}"
    first = (
        f"memory   : {byte_size(share.expected)} expected{who}, above {byte_size(share.bare)} of the bare process, for"
    )
    part = f"{several(share.edges, 'edge')}{nodes} of event {forecast.sample}{how}"
    lines = [f"{first} {part}"] if len(first) + len(part) < WIDEST else [first, f"           {part}"]
    if forecast.in_files:
        lines.append(
            f"           {byte_size(share.in_files)} of tables lie in files of --scratch: the same bits, more seconds"
        )
    recompute = "" if forecast.leaner is None else f"--recompute-every {forecast.leaner}, "
    for short in forecast.shortages():
        wanted, free = byte_size(sum(it.expected for it in short)), byte_size(min(it.free for it in short))
        lines += [
            f"WARNING: {several(len(short), 'rank')} on {short[0].where} will want {wanted}, {free} are free: the "
            "system may end the run.",
            f"         To take less: {recompute}more ranks on more machines{smaller}",
        ]
    return lines


def memory_taken(forecast: Forecast | None, taken: Sequence[int | None]) -> str:
    """The memory that the run took, beside the expected one if it was predicted.

    `taken`: bytes of each rank's peak above the bare process, None where it could not be measured.
    """
    peaks = [(peak, rank) for rank, peak in enumerate(taken) if peak is not None]
    if not peaks:
        return "memory   : no more than before the run"
    peak, rank = max(peaks)
    who = "" if len(taken) == 1 else f", on rank {rank}"
    taken_there = f"memory   : at most {byte_size(peak)} above the bare process{who}"
    if forecast is None:
        return taken_there
    return f"{taken_there}; {byte_size(forecast.shares[rank].expected)} were expected"


def idle_ranks(record: Mapping[str, Any], samples: Sequence[Sample], more: bool, world: World) -> tuple[str, list[str]]:
    """A note on ranks that owned nothing, with a way out: its kind and its lines; none if all had work.

    `more`: whether a step could take more samples than those of this training step or validation.
    """
    idle = [rank for rank, owned in enumerate(record["owned_nodes"]) if owned == 0]
    if len(idle) in (0, world.size):
        return "", []
    dealt = deal(samples, world.num_data_groups)
    groups = sorted({world.group_of(rank) for rank in idle})
    few, validates = not all(dealt[group] for group in groups), record["split"] == "val"
    theirs = samples if few else dealt[groups[0]]
    name = theirs[0].name + (", ..." if len(theirs) > 1 else "")
    when = f"the validation after step {record['step']}" if validates else f"training step {record['step']}"
    ranks = some_of([*map(str, idle)])
    of_groups = f"{world.num_data_groups} groups of ranks, {several(len(samples), 'sample')} ({name})"
    if few and validates:
        why = f"{of_groups}; training steps are not slower for it"
    elif few:
        why = f"{of_groups}: " + ("more --events-per-step, " if more else "") + "fewer ranks or a larger --domain-size"
    elif any(record["owned_nodes"][rank] for rank in world.groups[groups[0]]):
        why = f"no tile of {name} is theirs: fewer ranks, a smaller --domain-size or more tiles (prepare --tiles)"
    else:
        why = f"{name} has no hits, or was left out"
    lines = [
        f"note: {len(idle)} of {world.size} ranks own nothing in {when} ({ranks}). The result is the same;",
        f"      {why}",
    ]
    return f"{record['split']}, {'few samples' if few else 'few tiles'}", lines


def resume_command(directory: Path, config: TrainingFlags) -> str:
    """The command that resumes a run."""
    return f"{this_python()} -m domainpar.train --out {quote(str(directory))} --resume{own_code(config, CODE)}"


def own_code(config: TrainingFlags, names: Iterable[str]) -> str:
    """Those of some flags that name code of the user's own, which no file names, for a command."""
    return "".join(f" {flag(name)} {getattr(config, name)}" for name in names if is_code(getattr(config, name)))
