"""Programs of ranks on pretended GPUs: `python program.py NAME`, started on each rank."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from domainpar.parallel.process_group import NcclTransport
from domainpar.parallel.world import World


def _exchange(world: World, width: int = 3) -> torch.Tensor:
    """Rows of every rank to the next one, and back to the host."""
    size, rank = world.size, world.rank
    counts = [[0] * size for _ in range(2)]
    counts[0][(rank + 1) % size] = counts[1][(rank - 1) % size] = 2
    sent = torch.full((2, width), float(rank), device=world.device)
    received = torch.empty(2, width, device=world.device)
    return world.transport.start(sent, counts[0], received, counts[1]).finish().cpu()


def own_group() -> None:
    """A world over a group of the program's own, with the backends that it names."""
    backend = os.environ["BACKEND"] or None
    torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group(backend)
    world = World.from_process_group(device="cuda", domain_size=1)  # the current one
    limbs = torch.tensor([1, 2**40], device=world.device)
    world.transport.all_reduce(limbs)
    on_host = torch.tensor([world.rank])
    world.transport.all_reduce(on_host)
    rows = _exchange(world)
    host_rows = torch.empty(1, 1, dtype=torch.int64)
    other = [int(rank != world.rank) for rank in range(2)]
    world.transport.start(torch.tensor([[world.rank]]), other, host_rows, other).finish()
    words = world.transport.all_gather(b"x" * world.rank), world.transport.broadcast(b"root" if world.is_root else None)
    print(world.transport.name, rows.unique().tolist(), limbs.tolist(), on_host.tolist(), host_rows.tolist(), *words)
    world.close()
    dist.destroy_process_group()  # left alone, its threads may abort the process at its end


def part_of_a_group() -> None:
    """A world over some processes of a program, split further, while another one does something else."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timedelta(seconds=20))
    some = dist.new_group([0, 2])
    torch.cuda.set_device(1)  # the program may leave another one current
    if rank != 1:
        world = World.from_process_group(some, device, domain_size=1)
        print("rows", _exchange(world).unique().tolist(), world.domain.size, torch.cuda.current_device())
        world.close()
    dist.barrier()
    dist.destroy_process_group()


def met() -> None:
    """A world that a launcher started."""
    with World.session(device=os.environ.get("DEVICE", "cuda"), timeout=20.0) as world:
        own = torch.cuda.get_device_properties(world.device).uuid if world.device.type == "cuda" else "-"
        line = f"rank {world.rank} over {world.transport.name} on {world.device} = {own}"
        lines = world.transport.all_gather(line.encode())
        print("\n".join(text.decode() for text in lines) if world.is_root else "")


def silent() -> None:
    """Rank 1 never comes to an exchange that the GPU of rank 0 waits for."""
    with World.session(device="cuda", timeout=3.0) as world:
        if world.rank == 1:
            import time

            world.mark("forward", 7)
            time.sleep(60)
        _exchange(world)


# --- mistakes on purpose ---------------------------------------------------------------------------------------------


class WithoutWait(NcclTransport):
    """Takes rows without waiting for them."""

    def _by_stream(self, works, doing):
        posted = super()._by_stream(works, doing)
        posted.finish = lambda: None
        return posted


class HalfABatch(NcclTransport):
    """Leaves out what it should send."""

    def _post(self, outgoing, incoming, call):
        return super()._post([], incoming, call)


class FromTheHost(NcclTransport):
    """Hands rows of the host to NCCL."""

    def _wire_device(self, rows):
        return torch.device("cpu")

    def _post(self, outgoing, incoming, call):
        operations = [dist.P2POp(dist.isend, m.rows, group=self._group, group_peer=m.peer) for m in outgoing]
        return self._by_stream(dist.batch_isend_irecv(operations), "an exchange")


def mistaken() -> None:
    """An exchange and a sum with one of the mistakes."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    backend = "nccl" if os.environ["MISTAKE"] == "FromTheHost" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=10))
    transport = globals()[os.environ["MISTAKE"]](torch.device("cuda", rank), None, "cpu", 5.0)
    world = World.over(transport, torch.device("cuda", rank))
    limbs = torch.ones(2, dtype=torch.int64, device=world.device)
    pending = transport.start_all_reduce(limbs)
    rows = _exchange(world)
    pending.finish()
    print(rows.tolist(), limbs.tolist(), flush=True)
    import card
    import mocked_nccl  # which is there since torch was imported

    mocked_nccl.write_log()
    # A rank that ends takes its connections with it, which the other one may be reading from.
    logs, give_up_at = Path(os.environ[card.LOG]), time.monotonic() + 10
    while len(list(logs.glob("nccl.*.json"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    os._exit(0)  # what nobody waited for may never end


if __name__ == "__main__":
    globals()[sys.argv[1]]()
