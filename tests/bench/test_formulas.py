"""What a step costs by formula."""

from formulas import Network

EVENT = Network(num_nodes=100, num_edges=1000, node_features=5, edge_features=0, hidden=16, graph_iters=3)


def test_factorised_products_are_counted_by_hand():
    of_width = 2 * 16 * 16  # one row through one square layer
    per_node = 2 * 5 * 16 * 3 / 4 + of_width  # the encoder; data needs no gradient, 3 of 4 products
    per_node += 4 * 2 * of_width  # the halves of the first layers, encoder and iterations
    per_node += 2 * 4 * of_width  # two updates
    per_edge = of_width + 3 * 2 * of_width + 2 * of_width + 2 * 16
    assert EVENT.streamed_operations() == 4 * (100 * per_node + 1000 * per_edge)


def test_a_recompute_costs_one_more_forward_pass():
    forward = EVENT.streamed_operations(recomputed=2) - EVENT.streamed_operations(recomputed=1)
    assert forward == EVENT.streamed_operations(recomputed=1) - EVENT.streamed_operations(recomputed=0)
    assert 0 < forward < EVENT.streamed_operations(recomputed=0) / 2


def test_a_plain_step_of_a_full_event_holds_eleven_gigabytes_and_checkpoints_half_of_it():
    full = Network(num_nodes=91_749, num_edges=1_176_560, node_features=6, edge_features=0, hidden=64, graph_iters=4)
    assert 11.0e9 < full.plain_bytes() < 13.0e9
    assert 0.5 < full.plain_bytes(checkpointed=True) / full.plain_bytes() < 0.65
