"""Mean and deviation of every feature over many events, exactly: no order of events or rows changes a bit.

A float32 is a whole number of 2^-172. Sums of features and of their squares are whole numbers of Python, without any
rounding; they are rounded once, when they become constants.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from partitioners.topology import FloatArray

_UNIT_BITS = 172  # frexp gives 24 bits of a float32 times 2^-148 or more
_MANTISSA_BITS = 24
_ROWS_AT_ONCE = 2**20  # so many numbers below 2^29 are added as float64 without rounding; bounds the memory as well
_LEAST_SCALE = float(np.finfo(np.float32).tiny)  # a network in float32 could not divide by less


class Standard(NamedTuple):
    """Constants that bring features to one scale: (feature - mean) / scale.

    Attributes:
        node_mean: Mean of each node feature.
        node_scale: Standard deviation of each node feature; 1 where it does not vary.
        edge_mean: Mean of each edge feature.
        edge_scale: Standard deviation of each edge feature; 1 where it does not vary.
    """

    node_mean: tuple[float, ...]
    node_scale: tuple[float, ...]
    edge_mean: tuple[float, ...]
    edge_scale: tuple[float, ...]

    @classmethod
    def neutral(cls, node_features: int, edge_features: int) -> Standard:
        """Means of 0 and scales of 1: keeps the place of constants that a checkpoint has."""
        return cls((0.0,) * node_features, (1.0,) * node_features, (0.0,) * edge_features, (1.0,) * edge_features)

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of node features, and of edge features."""
        return len(self.node_mean), len(self.edge_mean)

    def lines(self, node_names: Sequence[str], edge_names: Sequence[str]) -> list[str]:
        """What it says of the features of these names: lines about nodes, then about edges; none without features."""
        lines = []
        for of, *columns in ("node", node_names, *self[:2]), ("edge", edge_names, *self[2:]):
            shown = [f"{name} {mean:.3g} +- {scale:.3g}" for name, mean, scale in zip(*columns)]
            text = f"{of} features, mean +- std: {', '.join(shown)}"
            lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False) if shown else []
        return lines

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Standard:
        """Read `_asdict()`, in which tuples have become lists.

        Raises:
            ValueError: If a constant is not finite, a scale not above 0, or means and scales are not as many.
            KeyError: If some are not there.
        """
        standard = cls(*(tuple(map(float, item[name])) for name in cls._fields))
        for of, mean, scale in (("nodes", *standard[:2]), ("edges", *standard[2:])):
            if len(mean) != len(scale) or not all(map(math.isfinite, mean + scale)) or min(scale, default=1) <= 0:
                raise ValueError(f"features of {of} cannot be standardised by means {mean} and scales {scale}")
        return standard


class FeatureSums(NamedTuple):
    """Sums over the rows of a table of features.

    Attributes:
        rows: Number of rows.
        values: Sum of each column, in units of 2^-172.
        squares: Sum of the squares of each column, in units of 2^-344.
    """

    rows: int
    values: Sequence[int]
    squares: Sequence[int]

    @classmethod
    def of(cls, table: FloatArray) -> FeatureSums:
        """The sums of a table, finite float32 [rows, columns].

        Raises:
            ValueError: If it holds numbers of another type, which may have more bits.
        """
        if table.dtype != np.float32:
            raise ValueError(f"exact sums are made of float32, got {table.dtype}.")
        sums = [_exact_sums(column) for column in table.T]
        return cls(len(table), [values for values, _ in sums], [squares for _, squares in sums])


def standard_of(events: Sequence[tuple[FeatureSums, FeatureSums]]) -> Standard:
    """The constants of some events, given the sums over the nodes and over the edges of each."""
    nodes, edges = zip(*events) if events else ((), ())
    return Standard(*mean_and_scale(nodes), *mean_and_scale(edges))


def mean_and_scale(tables: Sequence[FeatureSums]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each column of some tables together; 1 for that of one that does not vary."""
    rows = max(sum(table.rows for table in tables), 1)
    means, scales = [], []
    for column in zip(*(zip(table.values, table.squares) for table in tables)):
        value, square = map(sum, zip(*column))
        means.append(float(Fraction(value, rows << _UNIT_BITS)))
        scale = math.sqrt(Fraction(rows * square - value * value, rows * rows << 2 * _UNIT_BITS))
        scales.append(scale if scale >= _LEAST_SCALE else 1.0)
    return tuple(means), tuple(scales)


def _exact_sums(column: FloatArray) -> tuple[int, int]:
    """Sum and sum of squares of float32, in units of 2^-172 and 2^-344."""
    total, total_of_squares = 0, 0
    for start in range(0, len(column), _ROWS_AT_ONCE):
        fraction, exponent = np.frexp(column[start : start + _ROWS_AT_ONCE].astype(np.float64))
        whole = np.ldexp(fraction, _MANTISSA_BITS)
        high, low = np.divmod(whole * whole, 2.0**_MANTISSA_BITS)  # the 48 bits of a square, in halves
        shift = exponent + (_UNIT_BITS - _MANTISSA_BITS)  # at least 0
        # Numbers of one exponent together: whole ones, of which a float64 takes as many as there are rows at once.
        of_exponents = (np.bincount(shift, weights) for weights in (whole, high, low))
        for bits, (value, upper, lower) in enumerate(zip(*(sums.tolist() for sums in of_exponents))):
            total += int(value) << bits
            total_of_squares += (int(upper) << _MANTISSA_BITS) + int(lower) << 2 * bits
    return total, total_of_squares
