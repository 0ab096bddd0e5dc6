"""Every transport is tested once when its ranks meet, because libraries may transfer or add up numbers wrongly.

An example is MPICH 5.0.2 where the system forbids reading the memory of other processes: it leaves sums of some
thousand numbers unfinished and reports success. Sums of a few numbers take another path and are right.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from domainpar.common.agreement import Refused
from domainpar.parallel.errors import RankMissing, RanksFailed
from domainpar.parallel.transport import Transport

NUM_SUMMED = 100_000
NUM_SENT = 2**16  # 512 KiB: above the size at which libraries ask the receiver first, 4 to 256 KiB
FAILED = -1  # in place of a count: the library itself reported an error

AnyTransport = TypeVar("AnyTransport", bound=Transport)


def proved(transport: AnyTransport, device: torch.device | str = "cpu") -> AnyTransport:
    """Test a transport by a large sum and large messages, and return it; *collective*.

    It takes milliseconds: 100,000 numbers are summed, and each rank sends 512 KiB to some others, near and far. If the
    transport takes buffers on the GPU, these are tested too.

    Raises:
        Refused: On every rank, naming transport, library and ranks, if anything came out wrong on any.
        RuntimeError: If another rank failed, or did not come before the deadline.
    """
    if transport.size == 1:
        return transport
    devices = {"cpu", str(device)} if transport.takes_cuda else {"cpu"}
    tried = {
        f"of {NUM_SUMMED:,} sums over the ranks": _wrong_sums,
        f"of {NUM_SENT:,} numbers from another rank": _wrong_rows,
    }
    for place in sorted(devices):
        wrong = torch.zeros(len(tried), transport.size, dtype=torch.int64, device="cpu")
        for number, count in enumerate(tried.values()):
            try:
                wrong[number, transport.rank] = count(transport, place)
            except (RankMissing, RanksFailed):  # no rank can go on
                raise
            except RuntimeError:
                wrong[number, transport.rank] = FAILED
        own = wrong.clone()
        # A few numbers, which take another path. If even these are wrong, each rank still knows its own.
        transport.all_reduce(wrong)
        wrong[:, transport.rank] = own[:, transport.rank]
        texts = []
        for what, of_ranks in zip(tried, wrong.tolist()):
            if ranks := [rank for rank, count in enumerate(of_ranks) if count]:
                worst = max(of_ranks)
                count_in_words = f"{worst:,} came out wrong" if worst > 0 else "not all came, as the library says,"
                texts.append(f"{what} {count_in_words} on {transport.name_ranks(ranks)}")
        if texts:
            at = "" if place == "cpu" else f" from {place}"
            what = f"{transport.name} ({transport.library}) spoils what it carries{at}: {'; '.join(texts)}"
            raise Refused(what, transport.remedy)
    transport.bytes_sent = 0
    transport.seconds_exchanging = transport.seconds_waiting = 0.0
    return transport


def _wrong_sums(transport: Transport, device: str) -> int:
    """Numbers of a sum over all ranks that came out wrong here. *Collective*."""
    numbers = torch.arange(1, NUM_SUMMED + 1, device=device)
    sums = transport.start_all_reduce(numbers * (transport.rank + 1)).finish()
    return int((sums != numbers * (transport.size * (transport.size + 1) // 2)).sum())


def _wrong_rows(transport: Transport, device: str) -> int:
    """Numbers from ranks 1, 2, 4, ... before this one that arrived changed. *Collective*."""
    # Neighbours may be on one machine or all on different ones, as the launcher deals them.
    steps = [2**power for power in range((transport.size - 1).bit_length())]
    receivers = {(transport.rank + step) % transport.size for step in steps}
    senders = {(transport.rank - step) % transport.size for step in steps}
    send_counts = [int(peer in receivers) for peer in range(transport.size)]
    receive_counts = [int(peer in senders) for peer in range(transport.size)]
    send = torch.stack([_row_between(transport.rank, peer, device) for peer in sorted(receivers)])
    wanted = torch.stack([_row_between(peer, transport.rank, device) for peer in sorted(senders)])
    arrived = transport.start(send, send_counts, torch.zeros_like(wanted), receive_counts).finish()
    return int((arrived != wanted).sum())


def _row_between(sender: int, receiver: int, device: str) -> Tensor:
    """A row that shows sender and receiver, with another number at every place."""
    return torch.arange(NUM_SENT, device=device) * (1 + 31 * sender + 57 * receiver) + sender
