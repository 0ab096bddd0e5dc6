"""What inference takes of a run: its network, what that was trained as, and the events it was trained on."""

from __future__ import annotations

from pathlib import Path

import yaml

from domainpar.agreement import on_all, on_root
from domainpar.command_line import parse, settings_of_run
from domainpar.config import ConfigError, InferConfig, TrainConfig, resolved_yaml
from domainpar.events.own_events import store_of_run
from domainpar.events.store import EventStore
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.training.inputs import open_store
from domainpar.training.rundir import newest_run, state_of
from domainpar.training.trained import read_run


def choose_run(config: InferConfig, world: World) -> tuple[Path, TrainConfig]:
    """The run to take the network from, and what it was trained as. *Collective*."""
    run = Path(on_root(world.transport, lambda: config.run or str(newest_run())))

    def trained() -> str:
        read_run(run)  # says it better than a missing file does
        try:
            return resolved_yaml(trained_as(run, config))
        except ConfigError as error:
            raise Problem(error.what, error.hint) from error

    # Read and checked by one rank: the others get values that are known to be good.
    values = yaml.safe_load(on_root(world.transport, trained))
    if world.is_root and state_of(run, read_run(run)) == "died":
        print(f"note: the training in {run} ended without a word, as a killed process does", flush=True)
    return run, TrainConfig(**values | ({} if config.model is None else {"model": config.model}))


def trained_as(run: Path, config: InferConfig) -> TrainConfig:
    """What a run was trained as, by its `config.yaml`; a network of the user's own is named by `config.model`."""
    own = [] if config.model is None else ["--model", config.model]
    return parse(TrainConfig, "", ["--config", str(settings_of_run(run)), *own])


def open_events(config: InferConfig, run: Path, world: World) -> EventStore:
    """The store that is asked for, or else the one the run was trained on. *Collective*."""

    def path() -> Path:
        if config.store is not None:
            return Path(config.store)
        return store_of_run(run, read_run(run))

    return open_store(on_all(world.transport, path), world, config.on_bad_event)
