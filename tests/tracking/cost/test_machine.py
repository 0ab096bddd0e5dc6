"""The numbers of ranks of a machine that are looked at."""

from domainpar.tracking.cost.machine import Machine


def test_ranks_worth_a_look_are_few_divisors_and_multiples_of_four_up_to_the_cores():
    machine = Machine("node", ranks=18, memory=8e10)
    assert machine.numbers_of_ranks(64) == [1, 2, 3, 4, 6, 8, 9, 12, 16, 18]
    assert machine.numbers_of_ranks(12) == [1, 2, 3, 4, 6, 8, 9, 12]
