"""Which GPU a rank takes: told from what all of them see, whatever the launcher shows to each."""

from types import SimpleNamespace

import pytest
import torch
from marks import fault

from domainpar.common.agreement import Gathering
from domainpar.diagnosis.finding import Verdict
from domainpar.diagnosis.machine_checks import check_gpus
from domainpar.parallel import gpus
from domainpar.parallel.gpus import DeviceChoice, VisibleGpus, choose_device, dealt, mixed_kinds
from domainpar.parallel.meeting import choose_transport
from domainpar.parallel.process_group import NcclTransport

CPU = torch.device("cpu")


def seen(*of_ranks, host="n1"):
    return [VisibleGpus(host, list(uuids)) for uuids in of_ranks]


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        (["AB", "AB"], [0, 1]),  # torchrun: all see all
        (["A", "B"], [0, 0]),  # srun --gpus-per-task=1: each sees its own, and calls it number 0
        (["BA", "AB"], [0, 0]),
        (["AB", "A"], [1, 0]),  # who sees more can do without
        (["ABC", "AB", "A"], [2, 1, 0]),
        (["A", "A"], [0, None]),
        (["", "A"], [None, 0]),
        (["AB", "CD", "AB", "CD"], [0, 0, 1, 1]),  # two hosts, ranks dealt in turn
    ],
)
def test_each_rank_has_a_gpu_of_its_own_where_there_are_enough(of_ranks, expected):
    assert dealt(seen(*of_ranks)) == expected


@pytest.fixture
def on(monkeypatch):
    """Chooses the device of one rank, given what all of them see."""
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)

    def choose(device, of_ranks, rank=0, share=False):
        cards = of_ranks if isinstance(of_ranks[0], VisibleGpus) else seen(*of_ranks)
        monkeypatch.setattr(gpus, "seen_by", lambda ranks: cards)
        made.clear()
        choice = choose_device(device, share, Gathering(rank, len(cards)))
        assert made == ([] if choice.device == CPU else [choice.device])  # the current one, and nothing else is touched
        return choice

    return choose


@fault(10)
def test_ranks_without_a_gpu_of_their_own_are_refused_alike_on_all(on):
    for rank in (0, 1):
        with pytest.raises(ValueError, match="rank 1 .*host n1 shows 1 GPU to 2 ranks"):
            on("cuda", ["A", "A"], rank)
        with pytest.raises(ValueError, match=r"no GPU for ranks 0, 1 \(host n1\)"):
            on("cuda", ["", ""], rank)
    assert on("cuda", ["A", "A"], 1, share=True) == DeviceChoice(torch.device("cuda", 0), shared=True)
    told = [one._replace(may_share=True) for one in seen("A", "A")]  # NCCL, by each rank's environment
    assert on("cuda", told, 1, share=True) == DeviceChoice(torch.device("cuda", 0), shared=False)
    assert on("cuda", [told[0], told[0]._replace(may_share=False)], 0, share=True).shared
    apart = [one._replace(nccl_host=host) for one, host in zip(seen("A", "A"), ("h0", "h1"))]
    assert not on("cuda", apart, 1, share=True).shared
    assert on("cuda", [apart[0]] * 2, 0, share=True).shared, "one name for each machine, as a site may give it"
    assert [on("cuda", ["AB"] * 4, rank, share=True).device.index for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="no GPU for rank 1"):  # nothing to share
        on("cuda", ["A", ""], 0, share=True)


@pytest.mark.parametrize(
    ("error", "usable"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nSee ..."), []),
        (AssertionError("Invalid device id"), ["A"]),  # of a card cut in parts CUDA shows one, where torch counts cards
    ],
)
def test_cards_that_torch_counts_and_cuda_cannot_use_are_none(monkeypatch, on, error, usable):
    def properties(index):
        if index < len(usable):
            return SimpleNamespace(uuid=usable[index], name="GPU", total_memory=80 * 2**30)
        raise error

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    here = VisibleGpus.here()
    assert (here.uuids, here.why) == (usable, str(error).split("\n")[0])
    found = check_gpus(1, [here])
    assert found.verdict is Verdict.PASS if usable else found.verdict in (Verdict.SKIP, Verdict.WARN)
    assert here.why in found.found or found.verdict is Verdict.SKIP  # where there is no driver
    assert on("auto", [here, here]) == DeviceChoice(CPU)
    if usable:
        with pytest.raises(ValueError, match=r"1 GPU to 2 ranks \(Invalid device id\)"):
            on("cuda", [here, here])
    else:
        with pytest.raises(ValueError, match="no GPU for ranks 0, 1 .*NVIDIA driver"):
            on("cuda", [here, here])


def test_auto_takes_gpus_if_there_is_one_for_each_rank_and_says_why_where_some_are_left_alone(on, capfd):
    assert on("auto", ["AB", "AB"], 1) == DeviceChoice(torch.device("cuda", 1))
    assert on("auto", ["A", "A"], 1, share=True) == DeviceChoice(torch.device("cuda", 0), shared=True)
    assert on("auto", ["", ""]) == on("auto", ["A", "A"], 1) == on("cpu", ["A", "A"]) == DeviceChoice(CPU)
    assert capfd.readouterr().err == "", "of no GPU there is nothing to say, and rank 0 speaks"
    assert on("auto", ["A", "A"]) == DeviceChoice(CPU)
    assert "host n1 shows 1 GPU to 2 ranks" in capfd.readouterr().err
    assert on("auto", ["", "A"]) == DeviceChoice(CPU)
    assert "no GPU for rank 0 (host n1)" in capfd.readouterr().err


def test_nccl_wants_a_gpu_for_each_rank():
    alone, shared = DeviceChoice(torch.device("cuda", 0)), DeviceChoice(torch.device("cuda", 0), shared=True)
    assert choose_transport("auto", alone, has_mpi=True) == "nccl"
    assert choose_transport("auto", shared, has_mpi=True) == "mpi"
    assert choose_transport("auto", shared, has_mpi=False) == "gloo"
    with pytest.raises(ValueError, match="NCCL .*ranks share one"):
        choose_transport("nccl", shared, has_mpi=False)


def test_a_gpu_that_is_broken_is_not_waited_for(monkeypatch):
    """The watcher's thread, which asks, must live on: the error is for the rank's own thread."""

    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "device", broken)
    transport = object.__new__(NcclTransport)
    transport._gpu, transport.waiting_since = torch.device("cuda", 0), None
    assert transport.waits() is None


def test_gpus_of_two_kinds_are_a_problem_for_those_who_compare_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    card = torch.device("cuda", 0)
    assert mixed_kinds(Gathering(), card) is None
    others = Gathering(0, 3, lambda payload: [payload, payload, payload.replace(b"A100", b"H100")])
    assert " H100 on rank 2, but A100 on" in str(mixed_kinds(others, card))
