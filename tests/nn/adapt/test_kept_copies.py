"""Copies with ghosts that are kept for a second reader: current ones, with the gradients of where they are read."""

import torch
from whole_and_split import check


def test_a_copy_read_without_gradient_is_not_given_to_a_reader_that_needs_one():
    def two_readers(x, src, dst, e):
        h = x.new_zeros(x.size(0), e.size(1)).index_add(0, dst, e * x[src][:, :1])
        with torch.no_grad():
            seen = h[src].mean()
        return (h[src] * h[src]).sum(1) + seen

    check(two_readers)


def test_owned_rows_taken_without_gradient_are_not_given_to_a_reader_that_needs_one():
    def two_readers(x, src, dst, e):
        h = x.new_zeros(x.size(0), x.size(1)).index_add(0, dst, x[src])
        with torch.no_grad():
            seen = (x + h).mean()
        return (x + h) * seen

    check(two_readers)
