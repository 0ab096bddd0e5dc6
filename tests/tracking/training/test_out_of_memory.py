"""A rank that runs out of memory says in which layer, with how large a part, and what to try."""

import errno
import re
import threading

import numpy as np
import pytest
import torch
import watched
from marks import fault

from domainpar.nn.tilewise import EdgeTiles
from domainpar.parallel.errors import RanksFailed
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.monitor.failure import is_out_of_memory, requested_memory
from domainpar.tracking.training.sampler import samples_of


def too_much():
    """The error of torch's own allocator."""
    torch.empty(2**60, dtype=torch.uint8)


def fails_on_one(store, spoil, rank=1, **options):
    """The error of the rank that ran out of memory."""

    def spoil_one(trainer, world):
        if world.rank == rank:
            spoil(trainer)

    with pytest.raises(watched.StepFailed) as raised:
        run_ranks(_fails, 3, store, spoil_one, options)
    return raised.value


def _fails(world, *args):
    """Unlike in other failures, other ranks do not know: they are ended by the one that fails."""
    error = watched._steps(world, *args, num_steps=1, events_per_step=1)["error"]
    if isinstance(error, watched.StepFailed):
        raise error


@fault(32)
@pytest.mark.parametrize("layer", ["node_encoder", "edge_stages.1", "head"])
def test_in_a_forward_pass_the_layer_is_named(store, layer):
    def spoil(trainer):
        stage = trainer.model.get_submodule(layer)
        stage.trainable = too_much

    said = fails_on_one(store, spoil)
    assert said.what.startswith(f"out of memory in layer {layer} (forward): ")
    assert said.event == "000000000"
    assert "1.00 EiB asked for" in said.what
    assert " free on " in said.what


@fault(32)
@pytest.mark.parametrize("layer", ["node_encoder", "edge_stages.1", "head"])
def test_in_a_backward_pass_too(store, layer):
    def spoil(trainer):
        trainer.model.get_submodule(layer).add_limbs = lambda *given: too_much()

    said = fails_on_one(store, spoil)
    assert said.what.startswith(f"out of memory in layer {layer} (backward): ")


@fault(32)
@pytest.mark.parametrize(("direction", "failing_call"), [("forward", 1), ("backward", 2)])
def test_layers_that_are_computed_in_one_pass_are_named_together(store, monkeypatch, direction, failing_call):
    calls, plain = [], EdgeTiles._run

    def run(self, *given):
        if self.readout is not None and threading.current_thread().name == "rank 1":
            calls.append(1)
            if len(calls) == failing_call:
                too_much()
        return plain(self, *given)

    monkeypatch.setattr(EdgeTiles, "_run", run)
    said = fails_on_one(store, lambda trainer: None)
    assert said.what.startswith(f"out of memory in layers edge_stages.1 and head ({direction}): ")


@fault(32)
def test_how_large_the_part_is_and_what_to_try(store):
    sizes = []

    def spoil(trainer):
        def noted(*given):
            graph = trainer.now.part.graph
            sizes.append((graph.num_owned, graph.plan.num_ghosts, graph.num_edges))
            too_much()

        trainer.model.head.add_limbs = noted

    said = fails_on_one(store, spoil, graph_iters=3)
    owned, ghosts, edges = sizes[0]
    assert min(owned, ghosts, edges) > 0
    assert f"{owned:,} owned + {ghosts:,} ghost nodes, {edges:,} local edges; " in said.what
    assert re.search("--recompute-every auto, more ranks .*--hidden", said.hint)
    sparing = fails_on_one(store, spoil, recompute_every=2, graph_iters=3)
    assert re.match("try more ranks .*--hidden", sparing.hint)


@fault(32)
def test_while_an_event_is_loaded_and_in_numpy(store):
    def spoil(trainer):
        trainer.loader.load = lambda sample: np.empty(2**60, np.uint8)

    said = fails_on_one(store, spoil)
    assert said.what.startswith("out of memory in load: 1.00 EiB asked for; ")
    assert said.event == "000000000"


def test_in_the_optimiser_no_layer_is_named(store):
    def spoil(trainer):
        trainer.optimizer.step = too_much

    said = fails_on_one(store, spoil)
    assert said.what.startswith("out of memory in optimizer: 1.00 EiB asked for; ")
    assert said.event is None


def test_in_a_layer_of_an_own_network(store):
    def spoil(trainer):
        trainer.model.module.lin.register_forward_hook(lambda module, given, made: too_much())

    said = fails_on_one(store, spoil, model="own_models:small")
    assert said.what.startswith("out of memory in layer lin (forward): ")


def _validated(world, store):
    trainer = watched.trainer_of(store, world)
    trainer.model.head.trainable = too_much
    trainer.evaluate(samples_of(EventStore(store).events("val"), None), 3)


def test_while_validating(store):
    with pytest.raises(watched.StepFailed, match=r"out of memory in layer head \(evaluate\)"):
        run_ranks(_validated, 1, store)


CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 9 MiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "3221225472 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "is_one", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), True, "20.00 MiB"),
        (RuntimeError(CPU), True, "3.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1048576 bytes."), True, "1 MiB"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, None),
        (MemoryError("Unable to allocate 8.00 EiB for an array with shape (1,)"), True, "8.00 EiB"),
        (MemoryError(), True, None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True, None),
        (OSError(errno.ENOSPC, "No space left on device"), False, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, None),
        (RanksFailed("rank 1 failed: RuntimeError: out of memory"), False, None),
    ],
    ids=str,
)
def test_allocators_are_understood(error, is_one, asked):
    assert is_out_of_memory(error) is is_one
    assert requested_memory(str(error)) == asked


@pytest.mark.parametrize(
    "error", [KeyError("weight"), RuntimeError("shapes do not fit"), OSError(errno.ENOSPC, "full")]
)
def test_other_errors_pass_as_they_are(store, error):
    def spoil(trainer, world):
        def broken():
            raise error

        trainer.model.head.trainable = broken

    with pytest.raises(type(error)) as raised:
        watched.steps(store, 1, spoil)
    assert raised.value is error
