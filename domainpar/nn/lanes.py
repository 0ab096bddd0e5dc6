"""Rows of numbers as single values, inside numba kernels.

`Lanes` are sixteen numbers or a multiple, which a kernel loads, computes with and stores at once, in as many of the
machine's vector registers as they need. What a kernel does to each row is then written out: no reduction is reordered
by a compiler, none depends on what lies next to what in memory, and the code is as fast as the machine's vector units.
A sum over lanes goes by halving.

The number of lanes that a kernel takes is part of its type: a tuple `lanes_of`, of one element for each sixteen.

Arrays of uint16 hold bfloat16 numbers: they are loaded as float32, and rounded to the nearest, ties to even, when
stored.

numba and llvmlite have no public way to do this. Parts of them that may change without notice, here and in the rest of
the package, and what breaks when they go:

    numba's `context` in intrinsics (`make_array`, `cast`,      here, `products`: kernels do not compile, an error at
        `get_value_type`, `get_dummy_value`), and `cgutils`     their first call
    llvmlite's typed pointers (`.type.pointee` in `TableAt`)    here: the same
    `llvm.fma.v16f32`, an intrinsic of LLVM by its name         `products`: the same
    `get_compile_result`, `fndesc.llvm_cfunc_wrapper_name`      `operations`: no address of an operation, an error at
                                                                its first use
    `_cache` of compiled functions, a                           `common.compiling`: an error at import; if it is no
        `numba.core.caching.FunctionCache` with                 longer asked, nothing is kept (its tests)
        `load_overload`, `save_overload`, `_impl_class`
    `_cache_file` of that, an `IndexDataCacheFile` with         the same: an error at import; without `save` and `load`
        `save`, `load`, `_source_stamp`                         files do not say what they are of (its tests)
    "no locator available", `_locator_classes`,                 the same: an error at import where nothing can be
        `UserWideCacheLocator`                                  written, or a directory "~" of who has no home
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from domainpar.nn import COLUMN_BLOCK

_I16, _I32, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


def lanes_of(columns: int) -> tuple[int, ...]:
    """A tuple whose type tells kernels how many lanes to take: a multiple of 16."""
    return (0,) * (columns // COLUMN_BLOCK)


class Lanes(types.Type):
    """numba's type of a fixed count of numbers, float32 or float64, in LLVM a vector of that length.

    LLVM cuts long vectors into registers of the machine; arithmetic on each number is the same whatever their width.
    """

    def __init__(self, dtype: types.Type, count: int) -> None:
        self.dtype, self.count = dtype, count
        super().__init__(f"Lanes({dtype} x {count})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.VectorType(manager.lookup(lanes.dtype).get_value_type(), lanes.count))


class TableAt:
    """A table as code generators see it, for loads and stores of its numbers.

    Args:
        context, builder: numba's, of the code that is made.
        kind: numba's type of the table.
        value: The table.

    Raises:
        TypeError: If its rows do not lie side by side in memory.
    """

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        if kind.layout != "C":
            raise TypeError(f"numbers of a row lie side by side only in C-contiguous tables, not in {kind}.")
        self._context, self._builder, self._kind = context, builder, kind
        self._array = context.make_array(kind)(context, builder, value)

    @property
    def _narrow(self) -> bool:
        return bool(self._kind.dtype == types.uint16)

    def _pointer(self, row: Any, column: Any) -> Any:
        array, builder = self._array, self._builder
        shape, strides = (cgutils.unpack_tuple(builder, packed, 2) for packed in (array.shape, array.strides))
        return cgutils.get_item_pointer2(self._context, builder, array.data, shape, strides, "C", [row, column])

    def several(self, row: Any, column: Any, count: int) -> Any:
        # A pointer to one number becomes one to a vector: LLVM loads it at once.
        first = self._pointer(row, column)
        return self._builder.bitcast(first, ir.VectorType(first.type.pointee, count).as_pointer())

    def load(self, row: Any, column: Any, count: int = COLUMN_BLOCK) -> Any:
        """`count` numbers from a column on."""
        # A row may begin anywhere, so only the alignment of a single number is declared: otherwise LLVM would assume
        # that of the whole vector, and fault.
        bits = self._builder.load(self.several(row, column, count), align=self._kind.dtype.bitwidth // 8)
        return _widened(self._builder, bits) if self._narrow else bits

    def load_one(self, row: Any, column: Any) -> Any:
        """One number."""
        bits = self._builder.load(self._pointer(row, column))
        return _widened(self._builder, bits) if self._narrow else bits

    def store(self, row: Any, column: Any, value: Any) -> None:
        """As many numbers as the value has, from a column on."""
        pointer = self.several(row, column, value.type.count)
        value = _round_to_bfloat16(self._builder, value) if self._narrow else value
        self._builder.store(value, pointer, align=self._kind.dtype.bitwidth // 8)


def number_type(kind: Any) -> Any:
    """numba's type of the numbers that a table holds: uint16 stands for bfloat16, which is computed with as float32."""
    return types.float32 if kind.dtype == types.uint16 else kind.dtype


def _widened(builder: Any, bits: Any) -> Any:
    """bfloat16 to float32, one number or several: the same bits, followed by 16 zeros."""
    integers = _like(bits.type, _I32)
    return builder.bitcast(builder.shl(builder.zext(bits, integers), _each(integers, 16)), _like(bits.type, _FLOAT))


def _like(kind: Any, single: Any) -> Any:
    """Type of as many of `single` as a type holds."""
    return ir.VectorType(single, kind.count) if isinstance(kind, ir.VectorType) else single


def _each(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _index(context: Any, builder: Any, signature: Any, args: Any, position: int) -> Any:
    return context.cast(builder, args[position], signature.args[position], types.intp)


@intrinsic
def load(typing: Any, array: Any, row: Any, column: Any, lanes_of: Any) -> Any:
    """`array[row, column : column + 16 * len(lanes_of)]` of a C-contiguous table."""
    lanes = Lanes(number_type(array), COLUMN_BLOCK * len(lanes_of))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = [_index(context, builder, signature, args, position) for position in (1, 2)]
        return TableAt(context, builder, signature.args[0], args[0]).load(*at, lanes.count)

    return lanes(array, row, column, lanes_of), generate


@intrinsic
def store(typing: Any, array: Any, row: Any, column: Any, lanes: Any) -> Any:
    """`array[row, column : column + number of lanes] = lanes`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = [_index(context, builder, signature, args, position) for position in (1, 2)]
        TableAt(context, builder, signature.args[0], args[0]).store(*at, args[3])
        return context.get_dummy_value()

    return types.void(array, row, column, lanes), generate


@intrinsic
def zeros(typing: Any, array: Any, lanes_of: Any) -> Any:
    """+0.0 in all lanes, of the type of a table's numbers."""
    lanes = Lanes(number_type(array), COLUMN_BLOCK * len(lanes_of))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _each(context.get_value_type(lanes), 0.0)

    return lanes(array, lanes_of), generate


@intrinsic
def fetch(typing: Any, address: Any) -> Any:
    """Ask for the 64 bytes at an address, to be in the second cache when they are needed; any address may be given."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        reads, second_cache, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        builder.call(function, [pointer, reads, second_cache, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def as_kept(typing: Any, lanes: Any, array: Any) -> Any:
    """Lanes as a table would give them back: rounded, if that holds bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = array.dtype == types.uint16
        return _widened(builder, _round_to_bfloat16(builder, args[0])) if narrow else args[0]

    return lanes(lanes, array), generate


@intrinsic
def stream(typing: Any, array: Any, row: Any, lanes: Any) -> Any:
    """`array[row] = lanes`, past the caches: for what is not read soon, in tables that are 64-byte aligned."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _index(context, builder, signature, args, 1)
        table = TableAt(context, builder, signature.args[0], args[0])
        pointer = table.several(at, ir.Constant(at.type, 0), args[2].type.count)
        value = _round_to_bfloat16(builder, args[2]) if array.dtype == types.uint16 else args[2]
        # Other threads see it, on x86, after the next locked instruction of this one, and on ARM after the next that
        # releases: taking a tile (`program`) and a lock of Python are both.
        written = builder.store(value, pointer, align=32 if array.dtype == types.uint16 else 64)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return types.void(array, row, lanes), generate


def _round_to_bfloat16(builder: Any, value: Any) -> Any:
    # Nearest, ties to even: add half of the last bit that stays, less one unit if that bit is 0, then cut. A NaN could
    # be carried into infinity by the addition, so it is written as such.
    integers = _like(value.type, _I32)
    bits = builder.bitcast(value, integers)
    odd = builder.and_(builder.lshr(bits, _each(integers, 16)), _each(integers, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _each(integers, 0x7FFF))), _each(integers, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _each(integers, 0x7FC0), rounded), _like(value.type, _I16))


def _halved(builder: Any, value: Any) -> Any:
    """Lanes added up until 16 are left: by halving, odd parts before."""
    # Written out as shuffles and additions, for LLVM's own reduction may take any order. Only a power of two can be
    # halved to the end, so that parts of 16 in, say, 48 are added up first.
    parts = _split(builder, value, value.type.count & -value.type.count)
    value = parts[0]
    for part in parts[1:]:
        value = builder.fadd(value, part)
    while value.type.count > COLUMN_BLOCK:
        value = builder.fadd(*_split(builder, value, value.type.count // 2))
    return value


def _split(builder: Any, value: Any, count: int) -> list[Any]:
    """Parts of `count` lanes each."""
    nothing = ir.Constant(value.type, ir.Undefined)
    starts = range(0, value.type.count, count)
    wanted = [ir.Constant(ir.VectorType(_I32, count), list(range(start, start + count))) for start in starts]
    return [builder.shuffle_vector(value, nothing, lanes) for lanes in wanted]


ROWS_AT_ONCE = 8
"""Rows whose totals are made together."""


@intrinsic
def totals(typing: Any, array: Any, other: Any, row: Any, lanes_of: Any) -> Any:
    """The sum of each of 8 rows of a table from `row` on, times those of another table if that is one; 8 lanes.

    Lanes are added up by halving: lane i takes the one half their number on; odd parts are added up before.
    """
    count = COLUMN_BLOCK * len(lanes_of)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _index(context, builder, signature, args, 2)
        tables = [
            TableAt(context, builder, kind, value)
            for kind, value in zip(signature.args[:2], args[:2])
            if kind != types.none
        ]
        zero = ir.Constant(first.type, 0)
        rows = []
        for i in range(ROWS_AT_ONCE):
            at = builder.add(first, ir.Constant(first.type, i))
            values = [table.load(at, zero, count) for table in tables]
            rows.append(_halved(builder, builder.fmul(*values) if len(values) == 2 else values[0]))
        return _totals_of(builder, rows)

    return Lanes(number_type(array), ROWS_AT_ONCE)(array, other, row, lanes_of), generate


def _totals_of(builder: Any, rows: list[Any]) -> Any:
    """The totals of vectors of 16, in lanes of one vector; lanes are added in pairs by halving.

    A single row's last four additions wait for each other and for the shuffles between them. Here a vector holds
    the half-added lanes of ever more rows: 16 of one, then 8 each of two, 4 of four and 2 of eight.
    """
    half = COLUMN_BLOCK // 2
    while half:
        # Lanes of a pair of vectors, those of each row one behind the other, of which the first and second halves meet.
        lanes = range(COLUMN_BLOCK * min(len(rows), 2))
        low, high = ([lane for lane in lanes if lane // half % 2 == side] for side in (0, 1))
        pairs = zip(rows[::2], rows[1::2]) if len(rows) > 1 else [(rows[0], rows[0])]
        rows = [builder.fadd(_picked(builder, pair, low), _picked(builder, pair, high)) for pair in pairs]
        half //= 2
    return rows[0]


def _picked(builder: Any, pair: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _inverse_root(builder: Any, x: Any) -> Any:
    root = function_of_vectors(builder, "sqrt", x.type, 1)
    return builder.fdiv(_each(x.type, 1.0), builder.call(root, [x]))


class _Exp(NamedTuple):
    """What `exp` needs for one type of numbers.

    With n the integer next to x / ln 2 and r = x - n ln 2, at most ln 2 / 2 in size: exp x = 2^n exp r, and exp r is a
    Taylor polynomial whose next term is below half a unit of the last place.
    """

    largest: float  # beyond, 2^n is no normal number
    magic: float  # adding and subtracting it rounds to an integer
    ln2: tuple[float, float]  # in two parts, of which the first has zeros for n times it to be exact
    degree: int
    bits: int  # of the integer that holds such a number
    bias: int  # of its exponent
    mantissa: int  # bits of its mantissa


_EXP = {
    32: _Exp(87.0, 1.5 * 2**23, (0.693359375, -2.12194440e-4), 7, 32, 127, 23),
    64: _Exp(708.0, 1.5 * 2**52, (6.93145751953125e-1, 1.42860682030941723212e-6), 13, 64, 1023, 52),
}


def _exp(builder: Any, x: Any) -> Any:
    kind = x.type
    with_bits = _EXP[32 if kind.element == _FLOAT else 64]
    fma = function_of_vectors(builder, "fma", kind, 3)
    for bound, beyond in ((with_bits.largest, ">"), (-with_bits.largest, "<")):
        # An ordered comparison is false for NaN, which so passes.
        x = builder.select(builder.fcmp_ordered(beyond, x, _each(kind, bound)), _each(kind, bound), x)
    magic = _each(kind, with_bits.magic)
    rounded = builder.fadd(builder.fmul(x, _each(kind, 1 / math.log(2))), magic)
    n = builder.fsub(rounded, magic)
    r = x
    for part in with_bits.ln2:
        r = builder.call(fma, [n, _each(kind, -part), r])
    value = _each(kind, 1 / math.factorial(with_bits.degree))
    for power in range(with_bits.degree - 1, -1, -1):
        value = builder.call(fma, [value, r, _each(kind, 1 / math.factorial(power))])
    integers = _like(kind, ir.IntType(with_bits.bits))
    # The last bits of a number with the magic one added are n itself: no conversion, which NaN has none of.
    exponent = builder.add(builder.bitcast(rounded, integers), _each(integers, with_bits.bias))
    scale = builder.bitcast(builder.shl(exponent, _each(integers, with_bits.mantissa)), kind)
    return builder.fmul(value, scale)


def function_of_vectors(builder: Any, name: str, kind: Any, arguments: int) -> Any:
    """A function of LLVM for vectors of a type."""
    full = f"llvm.{name}.v{kind.count}f{32 if kind.element == _FLOAT else 64}"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * arguments), full)


def _sigmoid(builder: Any, x: Any) -> Any:
    one = _each(x.type, 1.0)
    return builder.fdiv(one, builder.fadd(one, _exp(builder, builder.fsub(_each(x.type, -0.0), x))))


def _tanh(builder: Any, x: Any) -> Any:
    share = _sigmoid(builder, builder.fadd(x, x))  # tanh x = 2 sigmoid(2 x) - 1
    return builder.fsub(builder.fadd(share, share), _each(x.type, 1.0))


def _function_of(form: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def function(typing: Any, lanes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return form(builder, args[0])

        return lanes(lanes), generate

    return function


# 1 / sqrt, each rounded as IEEE 754 says: the same on every machine.
inverse_root = _function_of(_inverse_root)
# To rounding, finite for all numbers, NaN for NaN; the same bits in any lane and on every machine.
exp, sigmoid, tanh = _function_of(_exp), _function_of(_sigmoid), _function_of(_tanh)


@intrinsic
def where_positive(typing: Any, condition: Any, lanes: Any) -> Any:
    """`lanes` but 0 where `condition` is 0 or less: not where it is NaN, so that none is lost."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = _each(args[0].type, 0.0)
        # An ordered comparison is false for NaN, which so passes, and is counted as not finite later.
        return builder.select(builder.fcmp_ordered("<=", args[0], zero), zero, args[1])

    return lanes(condition, lanes), generate


@intrinsic
def draw(typing: Any, row_key: Any, threshold: Any, scale: Any, lanes_of: Any) -> Any:
    """`scale` in lanes whose random 32 bits reach the threshold, else 0: a function of row key and lane alone."""
    lanes = Lanes(scale, COLUMN_BLOCK * len(lanes_of))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers = ir.VectorType(_I32, lanes.count)
        # The formula of `noise`: the lane's number enters with the key's low half, its high half between two mixings.
        low, high = (
            in_all_lanes(builder, builder.trunc(half, _I32), integers)
            for half in (args[0], builder.lshr(args[0], ir.Constant(args[0].type, 32)))
        )
        numbers = ir.Constant(integers, [lane * 0x9E3779B9 % 2**32 for lane in range(lanes.count)])
        bits = _scramble(builder, builder.add(numbers, low))
        bits = _scramble(builder, builder.xor(bits, high))
        kept = builder.icmp_unsigned(">=", bits, in_all_lanes(builder, args[1], integers))
        vector = context.get_value_type(lanes)
        return builder.select(kept, in_all_lanes(builder, args[2], vector), _each(vector, 0.0))

    return lanes(row_key, threshold, scale, lanes_of), generate


def in_all_lanes(builder: Any, value: Any, vector: Any) -> Any:
    """One number in all lanes of a vector of that type, in code that is made."""
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), _each(_like(vector, _I32), 0))


def _scramble(builder: Any, bits: Any) -> Any:
    """The mixing of `noise`, in all lanes."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = builder.xor(bits, builder.lshr(bits, _each(bits.type, shift)))
        bits = builder.mul(mixed, _each(bits.type, factor))
    return builder.xor(bits, builder.lshr(bits, _each(bits.type, 16)))


def _elementwise(name: str) -> Callable[..., Any]:
    @intrinsic
    def operation(typing: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = args[1] if right == left else in_all_lanes(builder, args[1], args[0].type)
            # No fast-math flags: nothing is contracted or reordered.
            return getattr(builder, name)(args[0], value)

        return left(left, right), generate

    return operation


def _give_operator(symbol: Callable[..., Any], operation: Callable[..., Any]) -> None:
    def implementation(left, right):  # type: ignore[no-untyped-def]  # numba compares the two signatures as written
        return operation(left, right)

    @overload(symbol)
    def resolve(left, right):  # type: ignore[no-untyped-def]
        return implementation if isinstance(left, Lanes) and right in (left, left.dtype) else None


for _symbol, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _give_operator(_symbol, _elementwise(_name))
