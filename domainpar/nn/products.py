"""Matrix products of blocks, by the faster of the libraries that torch carries.

In float32 that is oneDNN, which uses a processor's widest vectors whoever made it: MKL uses half of them where the
maker is another one (100 against 220 GFLOP/s a core, measured on a Zen 5). torch offers it for dense tables through
one operator, which takes no memory for its result. Where it is missing, and in other types, torch's own product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _has_onednn()


def linear(rows: Tensor, weight: Tensor, place: Callable[[], Tensor] | None = None) -> Tensor:
    """`rows @ weight.T`, [rows, in] and [out, in] to [rows, out]; without gradient.

    oneDNN compiles a kernel for each shape it meets and keeps a thousand of them: rows come in multiples of 32.

    Args:
        rows: An operand, see `blocks.rows_of`.
        weight: May be a transposed view.
        place: Memory for the result; taken only where the library can use it.
    """
    if HAS_ONEDNN and rows.dtype == torch.float32 and rows.shape[0]:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
        return found
    return torch.mm(rows, weight.t(), out=None if place is None else place())


def outer(gradient: Tensor, operand: Tensor) -> Tensor:
    """`gradient.T @ operand`, [rows, out] and [rows, in] to [out, in]: the gradient of a weight.

    Over all rows of a tile and no others, so of any number of them: oneDNN would compile a kernel for each number.
    """
    return gradient.t() @ operand
