"""The places of faults on purpose, and their actions. docs/faults.md has the same two tables."""

from __future__ import annotations

POINTS: dict[str, str] = {
    "init": "before the ranks meet",
    "joined": "after the ranks have met",
    "load": "a rank reads its part of an event",
    "plan": "before the plans of all ranks are compared",
    "forward": "before the forward pass of an event",
    "halo_fwd": "an exchange of the forward pass; `halo_fwd:1` is its second one",
    "loss": "the logits of an event are computed",
    "backward": "before the backward pass of an event",
    "halo_bwd": "an exchange of the backward pass; `halo_bwd:1` is its second one",
    "reduce": "before gradients are summed over the ranks",
    "optimizer": "before the optimiser changes parameters",
    "stepped": "after the optimiser has changed parameters",
    "boundary": "where ranks agree whether to go on",
    "evaluate": "before a validation event",
    "save": "a checkpoint is about to be written",
    "save:files": "after some of a checkpoint's files are written",
    "save:rename": "the files are there, but not under their name",
    "save:pointer": "the checkpoint is there, but nothing points to it",
    "save:drop": "before old checkpoints are removed",
    "score": "infer: before the scores of an event are gathered",
    "tracks": "infer: before tracks are built",
    "write": "infer: before the files of an event are written",
    "close": "the work is done, the ranks are about to part",
}  # fmt: skip
"""The places, by the name that `at=` takes."""

ACTIONS: dict[str, str] = {
    "kill": "the process ends as by kill -9",
    "raise": "an exception",
    "exit": "the process leaves with exit code 3, without a message",
    "sleep": "nothing happens for some seconds: `sleep:30`",
    "freeze": "the whole process stops, as by kill -STOP",
    "signal": "the process sends itself a signal: `signal:USR1`",
    "oom": "more memory is asked for than there is",
    "full": "the disk is full",
    "nan": "the first value of the tensor at hand becomes NaN (`loss`, `optimizer`, `stepped`)",
    "flip": "the lowest bit of the first value at hand flips (`optimizer`, `stepped`)",
    "short": "one row fewer is sent than was agreed (`plan`)",
    "long": "one row more is sent than was agreed (`plan`)",
    "swap": "two rows are sent in the wrong order (`plan`)",
    "peer": "rows go to the wrong rank (`plan`)",
    "stale": "the plan is that of another event (`plan`)",
    "id": "one row is that of another node (`plan`)",
}
"""The actions, by the name that `do=` takes."""

OF_PLANS = ("short", "long", "swap", "peer", "stale", "id")
"""Actions that spoil a plan."""
