"""Sixteen numbers at once, inside numba kernels.

`Lanes` is a hardware vector that a kernel loads, computes with and stores. What a kernel does to each row is then
written out: no reduction is reordered by a compiler, none depends on what lies next to what in memory, and the code
is as fast as the machine's vector units. A sum over a row is sixteen sums, one per lane, added up by halving.

Arrays of uint16 hold bfloat16 numbers: they are loaded as float32, and rounded to the nearest, ties to even, when
stored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16

_I16, _I32 = (ir.VectorType(ir.IntType(bits), LANES) for bits in (16, 32))
_FLOAT = ir.VectorType(ir.FloatType(), LANES)


class Lanes(types.Type):
    """numba's type of sixteen numbers, float32 or float64."""

    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.VectorType(manager.lookup(lanes.dtype).get_value_type(), LANES))


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Where the sixteen numbers at `array[row, column:]` lie."""
    if signature.args[0].layout != "C":
        raise TypeError(f"sixteen numbers lie side by side only in C-contiguous tables, not in {signature.args[0]}.")
    array = context.make_array(signature.args[0])(context, builder, args[0])
    at = [context.cast(builder, args[i], signature.args[i], types.intp) for i in (1, 2)]
    shape, strides = (cgutils.unpack_tuple(builder, packed, 2) for packed in (array.shape, array.strides))
    first = cgutils.get_item_pointer2(context, builder, array.data, shape, strides, "C", at)
    return builder.bitcast(first, ir.VectorType(first.type.pointee, LANES).as_pointer())


def _each(value: int) -> ir.Constant:
    return ir.Constant(_I32, [value] * LANES)


@intrinsic
def load(typing: Any, array: Any, row: Any, column: Any) -> Any:
    """`array[row, column : column + 16]` of a C-contiguous table."""
    narrow = array.dtype == types.uint16
    lanes = Lanes(types.float32 if narrow else array.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(_pointer(context, builder, signature, args), align=array.dtype.bitwidth // 8)
        return builder.bitcast(builder.shl(builder.zext(bits, _I32), _each(16)), _FLOAT) if narrow else bits

    return lanes(array, row, column), generate


@intrinsic
def store(typing: Any, array: Any, row: Any, column: Any, lanes: Any) -> Any:
    """`array[row, column : column + 16] = lanes`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, value = _pointer(context, builder, signature, args), args[3]
        if array.dtype == types.uint16:
            value = _round_to_bfloat16(builder, value)
        builder.store(value, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, row, column, lanes), generate


def _round_to_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _each(16)), _each(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _each(0x7FFF))), _each(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _each(0x7FC0), rounded), _I16)


@intrinsic
def spread(typing: Any, value: Any) -> Any:
    """One number in all sixteen lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _in_all(builder, args[0], context.get_value_type(signature.return_type))

    return Lanes(value)(value), generate


@intrinsic
def total(typing: Any, lanes: Any) -> Any:
    """The sum of sixteen numbers, by halving: lane i takes lane i + 8, then i + 4, i + 2, i + 1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        for half in (8, 4, 2, 1):
            other = ir.Constant(_I32, [lane + half if lane < half else 0 for lane in range(LANES)])
            shuffled = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), other)
            value = builder.fadd(value, shuffled)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return lanes.dtype(lanes), generate


@intrinsic
def where_positive(typing: Any, condition: Any, lanes: Any) -> Any:
    """`lanes` where `condition` is above 0, else 0; NaN where `condition` is NaN, so that none is lost."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(args[0].type, [0.0] * LANES)
        kept = builder.select(builder.fcmp_ordered(">", args[0], zero), args[1], zero)
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), args[0], kept)

    return lanes(condition, lanes), generate


@intrinsic
def draw(typing: Any, row_key: Any, column: Any, threshold: Any, scale: Any) -> Any:
    """`scale` in lanes whose random 32 bits reach the threshold, else 0: a function of row key and column alone."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = (_in_all(builder, builder.trunc(half, ir.IntType(32)), _I32) for half in _halves(builder, args[0]))
        column = builder.trunc(context.cast(builder, args[1], signature.args[1], types.int64), ir.IntType(32))
        counter = builder.add(_in_all(builder, column, _I32), ir.Constant(_I32, list(range(LANES))))
        bits = _scramble(builder, builder.add(builder.mul(counter, _each(0x9E3779B9)), low))
        bits = _scramble(builder, builder.xor(bits, high))
        kept = builder.icmp_unsigned(">=", bits, _in_all(builder, args[2], _I32))
        vector = context.get_value_type(signature.return_type)
        return builder.select(kept, _in_all(builder, args[3], vector), ir.Constant(vector, [0.0] * LANES))

    return Lanes(scale)(row_key, column, threshold, scale), generate


def _halves(builder: Any, bits: Any) -> tuple[Any, Any]:
    return bits, builder.lshr(bits, ir.Constant(ir.IntType(64), 32))


def _in_all(builder: Any, value: Any, vector: Any) -> Any:
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), _each(0))


def _scramble(builder: Any, bits: Any) -> Any:
    """The mixing of `noise`, sixteen at a time."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = builder.mul(builder.xor(bits, builder.lshr(bits, _each(shift))), _each(factor))
    return builder.xor(bits, builder.lshr(bits, _each(16)))


def _elementwise(name: str) -> Callable[..., Any]:
    @intrinsic
    def operation(typing: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return left(left, right), generate

    return operation


def _give_operator(symbol: Callable[..., Any], operation: Callable[..., Any]) -> None:
    def implementation(left, right):  # type: ignore[no-untyped-def]  # numba compares the two signatures as written
        return operation(left, right)

    @overload(symbol)
    def of_lanes(left, right):  # type: ignore[no-untyped-def]
        return implementation if isinstance(left, Lanes) and left == right else None


for _symbol, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _give_operator(_symbol, _elementwise(_name))
