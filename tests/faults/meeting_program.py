"""A program whose ranks meet, or do not; `test_meeting_faults.py` starts it by hand and under launchers."""

import os
import sys

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the commands do

import torch

from domainpar.parallel.world import World

if __name__ == "__main__":
    torch.set_num_threads(1)
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    with World.session(
        given.get("transport", "auto"),
        given.get("device", "cpu"),
        join_seconds=float(given.get("join", 60)),
        share_gpu="share" in given,
        num_ranks=int(given["ranks"]) if "ranks" in given else None,
        same={"--lr": given.get("lr", "0.001")},
    ) as world:
        world.transport.barrier()
        sys.stdout.write(f"rank {world.rank} of {world.size} over {world.transport.name}\n")  # in one piece
