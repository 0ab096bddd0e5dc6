"""Every transport keeps the same promises: `transport_cases.py` says which."""

import pytest
import transport_cases
from transport_cases import CASES

from domainpar.testing import find_mpiexec, run_ranks

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
PROCESSES = ["gloo", pytest.param("mpi", marks=needs_mpi)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_on_threads(num_ranks, case):
    run_ranks(case, num_ranks, timeout=20)


@pytest.mark.parametrize("transport", PROCESSES)
def test_on_processes_in_one_launch(transport):
    ran = run_ranks(transport_cases.all_cases, 4, transport=transport, timeout=50)
    assert ran == [[case.__name__ for case in CASES]] * 4


@pytest.mark.parametrize("transport", ["threads", *PROCESSES])
def test_trouble_is_named_with_its_rank(transport):
    told = run_ranks(transport_cases.trouble, 3, transport=transport, timeout=50)
    for rank in (0, 2):
        silence = told[rank][1]
        assert f"rank {rank} waited 0.4 s" in silence
        assert "nothing came from rank 1" in silence
        assert "rank 1: step 3, reading event 5" in silence
    if transport != "gloo":  # gloo does not notice; plans are compared before the first exchange
        for rank in (1, 2):
            assert "from rank 0" in told[rank][0] or "rank 0 sent" in told[rank][0]
