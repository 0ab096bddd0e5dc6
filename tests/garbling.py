"""A transport between threads that spoils rows of one type on their way, as a broken network would."""

from dataclasses import replace

import torch

from domainpar.parallel.threads import ThreadTransport
from domainpar.parallel.world import World

FLOATS, INTEGERS = torch.float64, torch.int64


class Garbling(ThreadTransport):
    """Sends everything as it is, but for rows of one type from one rank."""

    spoilt, sender, how = FLOATS, 0, "reversed"

    def _post(self, outgoing, incoming, call):
        if self.rank == self.sender:
            outgoing = [self._spoil(one) if one.rows.dtype == self.spoilt else one for one in outgoing]
        return super()._post(outgoing, incoming, call)

    def _spoil(self, message):
        if self.how == "one bit":
            rows = message.rows.clone()
            rows.view(-1).view(torch.uint8)[0] ^= 1
            return replace(message, rows=rows)
        return replace(message, rows=message.rows.flip(0) if self.how == "reversed" else message.rows * torch.nan)


def garbled(world, spoilt=FLOATS, how="reversed", sender=0):
    """The same ranks, talking over a broken network."""
    transport = Garbling(world.transport._switchboard, world.rank, world.transport.deadline)
    transport.spoilt, transport.how, transport.sender = spoilt, how, sender
    return World.over(transport, domain_size=world.size)
