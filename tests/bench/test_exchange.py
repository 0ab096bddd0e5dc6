import exchange
import pytest
import short_runs

from domainpar.testing import find_mpiexec, run_ranks


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
    sizes = [line["size"] for line in measured if line["measured"] == "message"]
    assert sizes == exchange.SIZES
    assert [table["cells"][0][0] for table in tables] == ["threads", "threads", "8"]


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_mpi_is_measured_beside_bare_mpi4py():
    messages = run_ranks(exchange.messages, 2, [8, 5000], 2, 3, transport="mpi", timeout=50)
    for rank in messages:
        assert all(
            {name: len(times) for name, times in of_a_size.items()}
            == dict.fromkeys(("exchange", "copy", "bare", "ping-pong"), 2)
            for of_a_size in rank.values()
        )


@pytest.mark.parametrize("latency", [2e-6, 3e-4])
def test_a_price_finds_the_latency_and_bandwidth_behind_times(latency):
    price = exchange.Price.fit({size: latency + 2e-10 * size for size in (8, 4096, 65_536, 4_194_304)})
    assert price.latency == pytest.approx(latency, rel=1e-2)
    assert price.per_byte == pytest.approx(2e-10, rel=1e-2)


def test_times_that_fall_with_size_leave_no_price_for_bytes():
    assert exchange.Price.fit({8: 2e-3, 4096: 1e-3, 65_536: 1e-3}) == exchange.Price(2e-3, 0.0)


def test_traffic_costs_each_message_and_byte_once():
    price = exchange.Price(latency=1.0, per_byte=0.001)
    assert exchange.Traffic(exchanges=[(2, 500), (1, 0)]).seconds(price, 4) == pytest.approx(2.5 + 1.0)
    assert exchange.Traffic(reduced=[1000]).seconds(price, 4) == pytest.approx(2 * 2 + 1.5)  # out and back
    assert exchange.Traffic(gathered=[100]).seconds(price, 4) == pytest.approx(2 + 0.3)
    assert exchange.Traffic(reduced=[1000], gathered=[100]).seconds(price, 1) == 0
