"""Score every edge of whole events with a trained network, build tracks from the scores, and compare them with truth.

Writes one zarr zip per event, in the order of your own files: hit_id, edge_index (rows of hit_id), edge_logit,
edge_score, edge_scored and, with --tracks, track_id (-1: none). The tracks are the same on any number of ranks.

Examples:
  python -m domainpar.infer                                        the newest run, on its own events
  mpiexec -n 8 python -m domainpar.infer --run runs/0001 --store stores/full --out scores
  python -m domainpar.infer --run pretrained:quickstart --tracks greedy --ckf    a shipped network
  python -m domainpar.infer --run runs/0001 --then runs/0002 --min-score 0.02    two networks, the first a filter
  python -m domainpar.infer --run runs/0001 --split val --checkpoint last
  mpiexec -n 8 python -m domainpar.infer --tracks greedy --ckf --split test    tracks, and those of the CKF
  python -m domainpar.infer --run runs/0002 --mode naive --sectors 8 --tracks greedy   a naive run, as it was trained
  python -m domainpar.infer --tracks greedy --format acorn          also files for acorn's evaluation
  torchrun --nproc-per-node 8 -m -- domainpar.infer --run runs/0001      without `--` torchrun takes --run for its own
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domainpar.parallel.allocator import set_up_allocator
from domainpar.tracking.command_line import run_command
from domainpar.tracking.config import SHIPPED, InferConfig, PrepareConfig, preset_of, session_arguments

if TYPE_CHECKING:
    from domainpar.parallel.world import World

SAMPLE_SEED = 5_000
"""Seed of the sample events: none that a shipped network was trained on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Score events as the command line says; returns the exit code. Collective."""
    return run_command(InferConfig, _work, __doc__, argv)


def _work(config: InferConfig) -> int:
    # Before torch is loaded: what it takes then would still be given back.
    allocator = set_up_allocator(config.allocator)

    import torch

    from domainpar.parallel.world import World

    torch.set_num_threads(1)  # ranks are the parallelism; more threads inside a kernel could change its bits
    with World.session(**session_arguments(config)) as world:
        runs = config.run or "", config.then or config.run or ""
        if config.store is None and all(run.startswith(SHIPPED) for run in runs):
            config = replace(config, store=str(_sample_events(config, world)))
        infer(config, world, allocator)
    return 0


def _sample_events(config: InferConfig, world: "World") -> Path:
    """Some simulated events for a network that is shipped, prepared where they are not there yet. *Collective*."""
    from domainpar.common.agreement import on_all, on_root
    from domainpar.prepare import prepare_store
    from domainpar.tracking.scoring.score_files import LIST
    from domainpar.tracking.training.pretrained import least_score_of, source

    # Refuses names that are not shipped.
    on_all(world.transport, lambda: str([source(run) for run in (config.run, config.then) if run]))
    name = (config.then or config.run or "").removeprefix(SHIPPED)
    store = Path("stores") / f"{name}-sample"
    if world.is_root:
        print(f"events   : {store}, simulated where they are not there yet; --store names others", flush=True)
    flags: dict[str, Any] = {"events": 3, "seed": SAMPLE_SEED, "val_split": 0, "test_split": 0.99, "store": str(store)}
    # Its map is not built anew: a network knows the graphs of its own.
    preset = {**PrepareConfig.PRESETS[preset_of(name)], "module_map": f"{SHIPPED}{name}"}
    preset.pop("map_target", None)  # of one that is built
    sample = PrepareConfig(**preset, **flags)
    if (least := least_score_of(name)) is None:
        return prepare_store(sample, world)
    # Two networks: what the first leaves of the edges is what the second was trained on.
    everything = prepare_store(replace(sample, store=f"{store}-unfiltered"), world)
    if config.then is not None:  # it is left out here, in memory
        return everything
    scores = everything.parent / f"{name}-scores"
    if on_root(world.transport, lambda: not (scores / LIST).is_file()):
        infer(InferConfig(run=f"{SHIPPED}{name}-filter", store=str(everything), out=str(scores)), world)
    return prepare_store(PrepareConfig(source="scores", input=str(scores), min_score=least, store=str(store)), world)


def infer(config: InferConfig, world: "World", allocator: str | None = None) -> None:
    """Score the events of a store with the network of a run, and print progress. *Collective*.

    Args:
        config: The order.
        world: The ranks.
        allocator: A sentence on the set-up of the C library's allocator, to be printed; None for none.

    Raises:
        Refused: On all ranks alike, before anything was written, if run, events or output directory will not do.
        Problem: If no event could be scored.
        RuntimeError: If an edge of an event did not get exactly one score.
    """
    from domainpar.tracking.scoring.inference import score_store

    score_store(config, world, allocator)


if __name__ == "__main__":
    sys.exit(main())
