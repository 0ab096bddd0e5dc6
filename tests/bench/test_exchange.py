import exchange
import pytest
import short_runs

from domainpar.testing import find_mpiexec


def test_exchanges_move_the_fewest_bytes_and_stand_beside_a_plain_copy(tmp_path_factory, tmp_path):
    flags = "--case tiny --transports threads --ranks 2 4 --repeats 2 --inner 2".split()
    exchange.main([*flags, *short_runs.flags(tmp_path_factory, tmp_path)])
    measured, tables = short_runs.lines(tmp_path)
    exchanges = [line for line in measured if line["measured"] == "exchange"]
    assert [line["ranks"] for line in exchanges] == [2, 4]
    for line in exchanges:
        assert line["bytes"] == line["lower_bound"] > 0
        assert all(line[name]["count"] == 2 and line[name]["median"] > 0 for name in exchange.EXCHANGES)
        assert line["bare"] is None  # only MPI knows it
    assert [table["cells"][0][0] for table in tables] == ["threads", "threads"]


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_mpi_is_measured_beside_bare_mpi4py(tmp_path_factory, tmp_path):
    flags = "--case tiny --transports mpi --ranks 2 --repeats 2 --inner 2".split()
    exchange.main([*flags, *short_runs.flags(tmp_path_factory, tmp_path)])
    (line,), _ = short_runs.lines(tmp_path)
    assert line["bare"]["count"] == 2
    assert line["bare"]["median"] > 0
