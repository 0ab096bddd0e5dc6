"""NCCL's side of `torch.distributed`, over gloo: what a GPU would do late is done late, and misuse is noticed.

* What is received holds NaN (or the lowest integer) until `wait`.
* A buffer that is sent from and changes before `wait` is a problem: NCCL reads it some time in between.
* A tensor that is not on this rank's GPU, or not in one piece, is a problem; so is work that nobody waits for.
* A lost connection is no error of a call: it counts as over, its `wait` does not end, the group knows of the loss.
* Two ranks on one GPU are refused in NCCL's words, unless they claim to be other hosts (`NCCL_HOSTID`).
* Every call of every group is written down, and compared between the ranks by `problems_of`.

It does not show streams: `wait` holds the host here, where NCCL holds the stream.
"""

import atexit
import json
import os
import time
import types
import weakref
import zlib
from pathlib import Path
from typing import Any

import card
import torch

_dist: Any = None
_real: dict[str, Any] = {}
_configs: dict[Any, str] = {}
_names: dict[int, str] = {}
_calls: list[list[Any]] = []
_problems: list[str] = []
_works: weakref.WeakSet[Any] = weakref.WeakSet()
_error = types.SimpleNamespace(name="SUCCESS")


def install(dist: Any) -> None:
    """Put the mock in the place of `torch.distributed`'s functions."""
    global _dist
    _dist = dist
    for function in (
        init_process_group, destroy_process_group, get_backend, get_backend_config, new_group,
        all_reduce, all_gather, broadcast, batch_isend_irecv,
    ):  # fmt: skip
        _real[function.__name__] = getattr(dist, function.__name__)
        setattr(dist, function.__name__, function)
    _real["_get_backend"] = dist.ProcessGroup._get_backend
    dist.ProcessGroup._get_backend = _get_backend
    atexit.register(write_log)


def _say(what: str) -> None:
    _problems.append(what)
    os.write(2, f"MOCKED NCCL: PROBLEM: {what}\n".encode())


def _key(group: Any) -> int:
    return 0 if group is None or group is _dist.group.WORLD else id(group)


def _name(group: Any) -> str:
    return _names.get(_key(group), "world")


def _by_nccl(tensor: Any, operation: str, group: Any) -> bool:
    """Whether NCCL carries a tensor in this group; whether it may is checked."""
    config = get_backend_config(group)
    if "nccl" not in config:
        return False
    if not tensor.is_cuda:
        if "cpu:gloo" in config:
            _calls.append([_name(group), f"control {operation}", str(tensor.dtype), tensor.numel(), ""])
            return False
        raise RuntimeError(f"No backend type associated with device type cpu (mocked NCCL: {operation})")
    if tensor.device.index != torch.cuda.current_device():
        _say(f"{operation} of a tensor on {tensor.device}, but this rank's GPU is {torch.cuda.current_device()}")
    if not tensor.is_contiguous():
        _say(f"{operation} of a tensor {tuple(tensor.shape)} that is not contiguous")
    return True


def _checksum(tensor: Any) -> int:
    return zlib.crc32(_host(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else 0


def _host(tensor: Any) -> Any:
    return tensor.detach().cpu()


def _spoil(tensor: Any) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        # Bytes may be those of floats: NaN, too.
        tensor.fill_(0xFF if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).min)


class Work:
    """A call under way: what arrives is there after `wait`."""

    def __init__(self, operation: str, works: list[Any], arrives: Any = (), sends: Any = ()) -> None:
        self._operation, self._works, self._arrives, self._done = operation, works, list(arrives), False
        self._sends = [(tensor, _checksum(tensor)) for tensor in sends]
        self._device = torch.cuda.current_device()
        _works.add(self)

    def wait(self, timeout: Any = None) -> bool:
        if self._done:
            return True
        try:
            for work in self._works:
                work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as error:
            if "Connection closed" not in str(error) and "Connection reset" not in str(error):
                raise
            _error.name = "REMOTE_ERROR"
            write_log()
            time.sleep(30)  # as the GPU does without end; torch ends the process by a signal, after a minute
            os.abort()
        self._done = True
        for tensor, before in self._sends:
            if _checksum(tensor) != before:
                _say(f"{self._operation}: rows {tuple(tensor.shape)} changed while they were sent")
        for tensor, host in self._arrives:
            tensor.copy_(host)
        return True

    def is_completed(self) -> bool:
        if (device := torch.cuda.current_device()) != self._device:
            _say(f"{self._operation} of GPU {self._device}: a thread of GPU {device} asks: a context more there")
        return self._done or _error.name != "SUCCESS" or all(work.is_completed() for work in self._works)

    def __del__(self) -> None:
        self.check()

    def check(self) -> None:
        """Say so if nobody has waited for it."""
        if not self._done:
            self._done = True
            _say(f"{self._operation}: nobody waited for it")


def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **how: Any) -> None:
    asked = "cpu:gloo,cuda:nccl" if backend is None else str(backend)
    if "nccl" not in asked:
        return _real["init_process_group"](backend, *args, **how)
    _real["init_process_group"]("gloo", *args, **how)
    _configs[0] = asked if ":" in asked else f"cuda:{asked}"
    if device_id is not None:  # the communicator is made at once
        _meet(None)
        _dist.group.WORLD.bound_device_id = device_id
    return None


def destroy_process_group(group: Any = None) -> None:
    _configs.pop(_key(group), None)
    _real["destroy_process_group"](group)


def _meet(group: Any) -> None:
    """The making of a communicator: ranks on one GPU are refused."""
    mine = os.environ.get("NCCL_HOSTID", "here"), torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    if os.environ.get("PRETENDED_DUPLICATE"):
        mine = mine[0], "one"
    everyone: list[Any] = [None] * _dist.get_world_size(group)
    _dist.all_gather_object(everyone, mine, group=group)
    if (first := everyone.index(mine)) != _dist.get_rank(group) or everyone.count(mine) > 1:
        other = next(i for i, one in enumerate(everyone) if one == mine and i != _dist.get_rank(group))
        raise _dist.DistBackendError(
            "NCCL error in: mocked: invalid usage (run with NCCL_DEBUG=WARN for details)\nLast error:\nDuplicate GPU "
            f"detected : rank {first} and rank {max(other, _dist.get_rank(group))} both on CUDA device 1a000"
        )


def _get_backend(group: Any, device: Any) -> Any:
    if "cuda:nccl" not in get_backend_config(group) or device.type != "cuda":
        return _real["_get_backend"](group, device)
    return types.SimpleNamespace(get_error=lambda: _error)


def get_backend(group: Any = None) -> str:
    config = get_backend_config(group)
    return "nccl" if config == "cuda:nccl" else "undefined" if "nccl" in config else _real["get_backend"](group)


def get_backend_config(group: Any = None) -> str:
    return _configs.get(_key(group)) or _real["get_backend_config"](group)


def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **how: Any) -> Any:
    asked = str(backend) if backend is not None else get_backend_config()
    if "nccl" not in asked:
        return _real["new_group"](ranks, timeout, backend, *args, **how)
    how.pop("device_id", None)
    world = _dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    if bound is not None:  # torch splits the communicator of all processes: a call of all of them
        _dist.barrier()
    group = _real["new_group"](ranks, timeout, "gloo", *args, **how)
    world.bound_device_id = bound
    _configs[id(group)] = asked if ":" in asked else f"cuda:{asked}"
    _names[id(group)] = "group " + ",".join(map(str, ranks))
    return group


def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    op = _dist.ReduceOp.SUM if op is None else op
    if not _by_nccl(tensor, "all_reduce", group):
        return _real["all_reduce"](tensor, op, group, async_op)
    _calls.append([_name(group), "all_reduce", str(tensor.dtype), tensor.numel(), str(op)])
    host = _host(tensor)
    posted = _real["all_reduce"](host, op, group, async_op=True)
    _spoil(tensor)
    return _after(Work("all_reduce", [posted], [(tensor, host)]), async_op)


def all_gather(into: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    if not _by_nccl(tensor, "all_gather", group):
        return _real["all_gather"](into, tensor, group, async_op)
    _calls.append([_name(group), "all_gather", str(tensor.dtype), tensor.numel(), ""])
    hosts = [torch.empty(one.shape, dtype=one.dtype) for one in into]
    posted = _real["all_gather"](hosts, _host(tensor), group, async_op=True)
    for one in into:
        _spoil(one)
    return _after(Work("all_gather", [posted], zip(into, hosts), [tensor]), async_op)


def broadcast(tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None) -> Any:
    if not _by_nccl(tensor, "broadcast", group):
        return _real["broadcast"](tensor, src, group, async_op, group_src)
    _calls.append([_name(group), "broadcast", str(tensor.dtype), tensor.numel(), str(group_src)])
    host = _host(tensor)
    posted = _real["broadcast"](host, src, group, True, group_src)
    return _after(Work("broadcast", [posted], [(tensor, host)]), async_op)


def _after(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def batch_isend_irecv(operations: Any) -> list[Any]:
    group = operations[0].group
    by_nccl = [_by_nccl(one.tensor, "message", group) for one in operations]  # each is looked at
    if not all(by_nccl):
        return _real["batch_isend_irecv"](operations)  # type: ignore[no-any-return]
    if not any(call[0] == _name(group) for call in _calls):
        _say(f"{_name(group)}: messages are the first call of this group: all its ranks would have to take part")
    works, arrives, sends = [], [], []
    for one in operations:
        peer, kind = one.group_peer, "send" if one.op is _dist.isend else "receive"
        _calls.append([_name(group), kind, str(one.tensor.dtype), one.tensor.numel(), peer])
        if kind == "send":
            works.append(_dist.isend(_as_bytes(_host(one.tensor)), group=group, group_dst=peer))
            sends.append(one.tensor)
        else:
            host = torch.empty(one.tensor.shape, dtype=one.tensor.dtype)
            works.append(_dist.irecv(_as_bytes(host), group=group, group_src=peer))
            arrives.append((one.tensor, host))
            _spoil(one.tensor)
    return [Work("messages", works, arrives, sends)]


def _as_bytes(tensor: Any) -> Any:
    return tensor.view(-1).view(torch.uint8)


def write_log() -> None:
    """Write what this rank did to the folder of the log; done when it ends, too."""
    for work in list(_works):
        work.check()
    if (folder := os.environ.get(card.LOG)) and _calls:  # else a launcher, or a rank alone
        rank = int(os.environ.get("RANK") or os.environ.get("PMI_RANK") or 0)
        Path(folder, f"nccl.{rank}.json").write_text(json.dumps({"calls": _calls, "problems": _problems}))


def problems_of(folder: Path, num_ranks: int) -> list[str]:
    """All that is wrong in the logs of all ranks: their own problems, other orders of calls, messages never met.

    Raises:
        FileNotFoundError: If a rank has left no log.
    """
    logs = [json.loads((folder / f"nccl.{rank}.json").read_text()) for rank in range(num_ranks)]
    found = [f"rank {rank}: {problem}" for rank, log in enumerate(logs) for problem in log["problems"]]
    for group in sorted({call[0] for log in logs for call in log["calls"]}):
        members = list(range(num_ranks)) if group == "world" else [int(rank) for rank in group.split()[1].split(",")]
        of_ranks = {rank: [call[1:] for call in logs[rank]["calls"] if call[0] == group] for rank in members}
        collective = {
            rank: [call for call in calls if call[0] not in ("send", "receive")] for rank, calls in of_ranks.items()
        }
        first = collective[members[0]]
        for rank, calls in collective.items():
            if calls != first:
                where = next((i for i, pair in enumerate(zip(calls, first)) if pair[0] != pair[1]), "the end")
                found.append(f"{group}: rank {rank} makes other calls than rank {members[0]}, from number {where} on")
        for sender, calls in of_ranks.items():
            for receiver in members:
                sent = [call[1:3] for call in calls if call[0] == "send" and members[call[3]] == receiver]
                taken = [
                    call[1:3] for call in of_ranks[receiver] if call[0] == "receive" and members[call[3]] == sender
                ]
                if sent != taken:
                    found.append(
                        f"{group}: rank {sender} sends {len(sent)} messages, {receiver} receives {len(taken)} of them"
                    )
    return found
