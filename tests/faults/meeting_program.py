"""A program whose ranks meet, or do not; `test_meeting_faults.py` starts it by hand and under launchers."""

import gc
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the commands do

import torch

from domainpar.parallel.world import World


def meet(words: Sequence[str]) -> None:
    """Meet the other ranks and say so. Words are options and variables of the environment; `name=` takes one away."""
    torch.set_num_threads(1)
    given = dict(word.split("=", 1) for word in words)
    for name in filter(str.isupper, given):
        os.environ[name] = given[name]
        if not given[name]:
            del os.environ[name]
    with World.session(
        given.get("transport", "auto"),
        given.get("device", "cpu"),
        join_seconds=float(given.get("join", 60)),
        share_gpu="share" in given,
        num_ranks=int(given["ranks"]) if "ranks" in given else None,
        same={"--lr": given.get("lr", "0.001")},
    ) as world:
        world.transport.barrier()
        told = given.get("told", "")
        sys.stdout.write(f"{told}rank {world.rank} of {world.size} over {world.transport.name}\n")  # in one piece


if __name__ == "__main__":
    gc.freeze()  # else the end of each process looks once more at all that torch has made
    for case in " ".join(sys.argv[1:]).split(" then "):
        meet(case.split())
