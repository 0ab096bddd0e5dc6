"""Products of Triton's interpreter as a card has them: one chain of sums over K for each number, in its order.

It multiplies blocks with numpy, whose library sums a row otherwise where it stands at another place of the block; on
some processors only.
"""

from __future__ import annotations

from typing import Any


def products_in_order(interpreter: Any) -> None:
    """Have an interpreter (the module) sum so from now on."""
    builder, plain = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if any(one.dtype.primitive_bitwidth == 8 for one in (a, b)):
            return plain(self, a, b, d, *how)
        total = d.data
        for k in range(a.data.shape[-1]):
            total = total + a.data[..., :, k : k + 1].astype(total.dtype) * b.data[..., k : k + 1, :].astype(
                total.dtype
            )
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.create_dot = dot
