"""Sums over ranks of gradients and of changes of buffers, with the same bits on all; checks that parameters agree."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from domainpar.common.agreement import agree_on, gather, name_ranks
from domainpar.nn.adapt.across import payload_of, shape_and_type, tensor_of
from domainpar.nn.adapt.part import holds_rows
from domainpar.nn.adapt.rows import version_of
from domainpar.parallel.digests import checksums, what_differs
from domainpar.parallel.errors import RanksDiffer
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.places import in_words, where
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World

NOT_FINITE = 10_000  # larger than any exponent of a double
LOWEST = -1022  # below it numbers lose bits anyway
_SUMMED = "_domainpar_summed"  # of a gradient that was summed: the version that was left
LOOK_EVERY = 100  # passes
DECIDED = (
    "something else than optimizer.step() on summed gradients changed them, or a rank decided by a number of its own, "
    "as its share of the loss (a schedule, an early stop, a clip, noise)"
)
DECIDE = "decide on every rank by what all of them have: part.all_reduce(loss) is the loss; draw noise from equal seeds"


class GradientSums:
    """Sums over ranks the gradients that backward passes left in the parameters of a module.

    Args:
        module: Its parameters that require a gradient, in order, are summed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def rejected_now(self) -> Tensor:
        """0: what is not finite is found in `reduce`."""
        return torch.zeros((), dtype=torch.int64, device="cpu")

    def expect_last_pass(self, transport: Transport) -> None:
        """Nothing starts before `reduce`: sums are scaled by the largest gradient of a parameter on all ranks."""

    def reduce(self, transport: Transport) -> Tensor:
        """Sum over ranks, and leave the result in each parameter's `grad`. *Collective*.

        Every parameter takes part, also one that this rank has no gradient of. Where no rank has one it stays None, so
        that optimisers pass over it as on one rank.

        Returns:
            0; or, if a gradient of some rank or a sum is not finite, a larger number, and the gradients mean nothing;
            int64 [].

        Raises:
            RanksDiffer: On all ranks alike, if gradients hold what was summed before.
        """
        again = any(_is_summed(parameter.grad) for parameter in self._parameters if parameter.grad is not None)
        # A rank that had no use for a parameter has no gradient of it, and takes part all the same.
        gradients = [parameter.grad for parameter in self._parameters]
        kinds = [0 if gradient is None else 2 if gradient.is_sparse else 1 for gradient in gradients]
        *exists, again = map(max, zip(*transport.all_gather(bytes([*kinds, again])), strict=True))
        if again:
            raise RanksDiffer(
                f"{in_words(*where()) or 'the sum of gradients'} finds gradients that were summed over ranks before, "
                "which would count once for each rank",
                "it was called twice, or zero_grad() was left out since; call each once for every step",
            )
        rows = [_rows_of_sparse(it, transport) if exist == 2 else None for it, exist in zip(self._parameters, exists)]
        sums = sum_exactly([dense_gradient(parameter) for parameter in self._parameters], transport)
        if sums is None:
            return torch.ones((), dtype=torch.int64, device="cpu")
        # Rounded to the parameter's type, in which a finite sum may have become infinite.
        put_back = [total.to(parameter.dtype) for total, parameter in zip(sums, self._parameters)]
        for parameter, total, exist, of_sparse in zip(self._parameters, put_back, exists, rows):
            parameter.grad = None if not exist else total if of_sparse is None else _sparse(total, of_sparse)
            if parameter.grad is not None:
                parameter.grad.__dict__[_SUMMED] = parameter.grad._version
        spoilt = [~total.isfinite().all() for total in put_back]
        return torch.stack(spoilt).sum() if spoilt else self.rejected_now()


def _is_summed(gradient: Tensor) -> bool:
    """Whether this very tensor was left by a sum, and at most one thing was done to it since.

    More than one may be that it was filled with zeros and added to.
    """
    left = gradient.__dict__.get(_SUMMED)
    return left is not None and gradient._version <= left + 1 and bool(_dense(gradient).count_nonzero())


def _rows_of_sparse(parameter: Tensor, transport: Transport) -> Tensor:
    """The rows that a sparse gradient has on any rank, int64 [n]: optimisers leave all others alone. *Collective*."""
    present = torch.zeros(parameter.size(0), dtype=torch.int64, device=parameter.device)
    if parameter.grad is not None:
        present[parameter.grad.coalesce().indices()[0] if parameter.grad.is_sparse else slice(None)] = 1
    transport.all_reduce(present, "max")
    return present.nonzero().view(-1)


def _sparse(total: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a gradient, as `nn.Embedding(sparse=True)` leaves them."""
    return torch.sparse_coo_tensor(
        rows[None], total[rows], total.shape, device=total.device, check_invariants=False, is_coalesced=True
    )


class Replicas:
    """The tensors of a module that have to agree on all ranks: its parameters, and between groups of ranks its buffers.

    Args:
        module: The module, which is the same on every rank now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of a parameter: its version, its memory and checksum
        self._last = self.checksum()
        self._buffers = {name: buffer.clone() for name, buffer in self._whole_buffers()}
        self._summed, self._passes = False, 0

    def __deepcopy__(self, memo: Any) -> Replicas:
        return Replicas(copy.deepcopy(self._module, memo))

    def note_sum(self) -> None:
        """Gradients were summed."""
        self._summed = True

    def state(self) -> bytes:
        """What ranks compare in every pass: a checksum of the parameters, and whether `reduce_gradients` was left out.

        Parameters whose version torch has not counted up keep their last checksum. Every 100th pass computes all
        checksums anew, because changes through `.data` are not counted.
        """
        if self._passes % LOOK_EVERY == 0:
            self._known.clear()
        self._passes += 1
        checksum, missing = self.checksum(), False
        if checksum != self._last:
            missing = not self._summed
            self._last, self._summed = checksum, False
        return bytes([missing]) + checksum.to_bytes(4, "little")

    def last_state(self) -> bytes:
        """The state when the world closes, with every parameter looked at."""
        self._known.clear()
        return self.state()

    def checksum(self) -> int:
        """One of all parameters, in their order."""
        parameters, new = list(self._module.parameters()), {}
        for number, parameter in enumerate(parameters):
            known = self._known.get(parameter)
            if known is None or known[:2] != (version_of(parameter), parameter.data_ptr()):
                new[number] = parameter
        for number, checksum in checksums(new).items():
            self._known[new[number]] = (version_of(new[number]), new[number].data_ptr(), checksum)
        return zlib.crc32(json.dumps([self._known[parameter][2] for parameter in parameters]).encode())

    def compare(self, states: Sequence[bytes], transport: Transport) -> None:
        """Refuse where the states of the ranks differ; without talk where they do not. *Collective*.

        Raises:
            RanksDiffer: On all ranks alike, naming the ranks and the first parameter that differs.
        """
        if len({state[1:] for state in states}) == 1:
            return
        self._known.clear()  # what was changed behind torch's back is known to one rank, and not to another, maybe
        differing = what_differs(dict(self._module.named_parameters()), transport)
        if differing is None:
            return
        why, hint = DECIDED, DECIDE
        if any(state[0] for state in states):
            why = "parameters changed without reduce_gradients()"
            hint = "on every rank, call it after the last backward and before optimizer.step(); else change them alike"
        raise RanksDiffer(f"{differing[0]}: {why}", hint)

    def settle_groups(self, world: World) -> None:
        """Where groups of ranks take graphs of their own: see that they hold one model, after each step. *Collective*.

        A buffer in which the groups differ, running means say, has changed since the last time by the mean of what they
        changed; one of integers by their sum.

        Raises:
            RanksDiffer: On all ranks alike, if parameters differ, or buffers of ranks that share a graph.
            RuntimeError: On all ranks alike, if a buffer became infinite or NaN.
        """
        if world.num_data_groups == 1:
            return  # all ranks compare what they hold in each pass
        buffers = dict(self._whole_buffers())
        held = gather(world.transport, [self.checksum(), checksums(buffers)])
        self.compare([bytes(1) + of_rank.to_bytes(4, "little") for of_rank, _ in held], world.transport)
        firsts = [held[ranks[0]][1] for ranks in world.groups]
        for ranks, first in zip(world.groups, firsts):
            if others := [rank for rank in ranks if held[rank][1] != first]:
                raise RanksDiffer(
                    f"buffers of {name_ranks(others)} are not those of rank {ranks[0]}, with which they share a graph",
                    DECIDE,
                )
        if any(first.keys() != firsts[0].keys() for first in firsts):
            raise RanksDiffer("groups of ranks hold other buffers", "make a module's buffers when it is made")
        differing = [name for name in buffers if len({first[name] for first in firsts}) > 1]
        before = [self._buffers.get(name, torch.zeros_like(buffers[name])) for name in differing]
        changes = StepBuffers([buffers[name] for name in differing], before)
        with changes.sample(counts=world.rank == world.groups[world.data_group][0]):
            pass  # it was before this
        changes.end(world.transport, world.num_data_groups)
        self._buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    def _whole_buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._module.named_buffers() if not holds_rows(buffer)]


def dense_gradient(tensor: Tensor) -> Tensor:
    """The gradient that was left in a tensor; zeros where there is none."""
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    return _dense(tensor.grad.detach())


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def sum_exactly(tensors: Sequence[Tensor], transport: Transport) -> list[Tensor] | None:
    """Sums over ranks of tensors that have the same shapes on all, in float64, the same bits on all. *Collective*.

    Each tensor is scaled by a power of two of its own, which loses no bit, so that small ones are summed as well as
    large ones: to 2^-73 of the largest number in it.

    Returns:
        The sums; None on every rank if a number of any rank is not finite.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    exponents = _exponents(tensors, device)
    transport.all_reduce(exponents, "max")
    if bool((exponents >= NOT_FINITE).any()):
        return None
    flat = [torch.ldexp(tensor.flatten().double(), -power) for tensor, power in zip(tensors, exponents.to(device))]
    sizes = [len(tensor) for tensor in flat]
    sums = IntegerSums(sum(sizes), device)
    sums.add(torch.cat([torch.zeros(0, device=device, dtype=torch.float64), *flat]))  # of nothing there is no cat
    sums.reduce(transport)
    totals = zip(tensors, sums.total().split(sizes), exponents.to(device))
    return [torch.ldexp(total, power).view(tensor.shape) for tensor, total, power in totals]


def _exponents(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """For each tensor the power of two next above all magnitudes, `NOT_FINITE` if one is not finite; int64 [n]."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    # Of a NaN the largest is NaN. Nothing here makes the host wait for a GPU.
    largest = torch.stack([each.abs().max().double() if each.numel() else zero for each in tensors] or [zero])
    finite, powers = largest.isfinite(), torch.frexp(torch.nan_to_num(largest)).exponent.long().clamp_min(LOWEST)
    powers = torch.where(largest == 0, LOWEST, powers)
    return torch.where(finite, powers, NOT_FINITE)[: len(tensors)]


class StepBuffers:
    """Makes the change of a module's buffers in one step independent of which ranks compute which samples.

    Each sample starts from the buffers as they were at the beginning of the step. At the end a buffer of floats has
    changed by the mean of the changes of all samples, one of integers by their sum. For one sample this is what torch
    does.

    Args:
        buffers: The buffers of the module that may change.
        before: Their values at the beginning of the step; None: their values now.
    """

    def __init__(self, buffers: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> None:
        self._buffers = list(buffers)
        self._before = [buffer.clone() for buffer in self._buffers] if before is None else list(before)
        self._changes = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in self._buffers]

    @contextmanager
    def sample(self, counts: bool) -> Iterator[None]:
        """Around one sample. `counts`: whether this rank is the one of those that share it to speak for it."""
        yield
        with torch.no_grad():
            for buffer, before, change in zip(self._buffers, self._before, self._changes):
                if counts:
                    # Not a plain difference: of two infinities it is no number.
                    same = (buffer == before) | (buffer.isnan() & before.isnan())
                    change += torch.where(same, 0.0, buffer.double() - before.double())
                buffer.copy_(before)

    def end(self, transport: Transport, num_samples: int) -> None:
        """Leave in the buffers what the whole step made of them. *Collective*.

        Args:
            transport: Joins all ranks.
            num_samples: Samples of the step, on all ranks together.

        Raises:
            RuntimeError: On all ranks alike, if a buffer became infinite or NaN.
        """
        if not self._buffers:
            return
        totals = sum_exactly(self._changes, transport)
        if totals is None:
            raise RuntimeError(
                "a buffer of the model (running means, say) became infinite or NaN in this step; look at its inputs."
            )
        with torch.no_grad():
            for buffer, before, total in zip(self._buffers, self._before, totals):
                change = total / num_samples if buffer.is_floating_point() else total.round()
                buffer.copy_(torch.where(change == 0, before.double(), before.double() + change))


def take_from_root(tensors: Mapping[str, Tensor], world: World) -> None:
    """Give tensors, parameters and buffers say, the values they have on rank 0. *Collective*.

    Raises:
        Refused: On all ranks alike, if a name, a shape or a type is another one on some rank.
    """
    agree_on(
        world.transport,
        {f"the module's {name}": shape_and_type(tensor) for name, tensor in tensors.items()},
        "build the same module on every rank; of a tensor that holds rows of a part this is known if it comes from "
        "part.nodes, part.edges or the like, or is part.edge_index itself",
    )
    with torch.no_grad():
        for _, tensor in sorted(tensors.items()):
            payload = world.transport.broadcast(payload_of(tensor) if world.is_root else None)
            if not world.is_root:
                tensor.copy_(tensor_of(payload, tensor).view(tensor.shape))
