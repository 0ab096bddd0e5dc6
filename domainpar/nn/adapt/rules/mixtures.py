"""Calls that mix numbers along some dimensions: row by row, where the rows do not lie along one of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import Call, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, mark
from domainpar.nn.adapt.rules.elementwise import changed, find_place, without_rows
from domainpar.nn.adapt.rules.order import OVER_ROWS
from domainpar.nn.adapt.rules.reductions import softmax_over_rows
from domainpar.nn.adapt.watch import Watch, rule


class Mixed(NamedTuple):
    """The dimensions that a call mixes.

    Attributes:
        default: Those that it mixes if it is not told; None for all. Or a function of the call and one of its tensors.
        takes: Its arguments; the one that begins with `dim` tells the dimensions.
    """

    default: int | tuple[int, ...] | Callable[[Call, Tensor], Iterable[int]] | None
    takes: str = "input"

    def of(self, call: Call, tensor: Tensor) -> Collection[int]:
        """The dimensions of one of the call's tensors."""
        if callable(self.default):
            dims: Any = self.default(call, tensor)
        else:
            name = next((name for name in self.takes.split() if name.startswith("dim")), None)
            dims = call.get(name, self.default) if name else self.default
        dims = range(tensor.dim()) if dims is None else (dims,) if isinstance(dims, int) else dims
        return {dim % tensor.dim() for dim in dims if -tensor.dim() <= dim < tensor.dim()}


MATRICES = words(
    "cholesky cholesky_inverse cholesky_solve det inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det "
    "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor "
    "linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve "
    "linalg_solve_triangular linalg_svd linalg_svdvals logdet matrix_exp matrix_power pinverse qr slogdet svd tril triu"
)
MIXES = {
    **dict.fromkeys(words("argsort cummax cummin glu log_softmax softmax softmin sort"), Mixed(-1, "input dim")),
    **dict.fromkeys(words("cumprod cumsum logcumsumexp"), Mixed(None, "input dim")),
    **dict.fromkeys(words("diff linalg_cross linalg_vecdot"), Mixed(-1, "input by dim")),
    "topk": Mixed(-1, "input by|k dim largest sorted"),
    "kthvalue": Mixed(-1, "input by|k dim keepdim"),
    "cosine_similarity": Mixed(1, "input by dim"),
    "normalize": Mixed(1, "input p dim eps"),
    "cross": Mixed(None, "input by dim"),
    **dict.fromkeys((*MATRICES, "cdist", "fold", "linalg_diagonal"), Mixed((-2, -1), "input|A")),
    **dict.fromkeys(words("diag_embed pairwise_distance view_as_complex"), Mixed(-1)),
    **dict.fromkeys(words("pixel_shuffle pixel_unshuffle"), Mixed((-3, -2, -1))),
    "view_as_real": Mixed(()),
    **dict.fromkeys(words("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"), Mixed(-1, "input by dim")),
    **dict.fromkeys(words("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"), Mixed((-2, -1), "input by dim")),
    **dict.fromkeys(words("fft_fftn fft_ifftn fft_rfftn fft_irfftn"), Mixed(None, "input by dim")),
    **dict.fromkeys(words("fft_fftshift fft_ifftshift unflatten"), Mixed(None, "input dim")),
    "roll": Mixed(None, "input by dims"),
    "rot90": Mixed((0, 1), "input by dims"),
    **dict.fromkeys(words("median nanmedian mode aminmax"), Mixed(None, "input dim keepdim")),
    "quantile": Mixed(None, "input q dim keepdim interpolation"),
    # of pictures, in torch.nn.functional, or of a tensor along a dimension
    "unfold": Mixed(
        lambda call, _: call.get("dimension", 0) if call.func is Tensor.unfold else (-3, -2, -1), "input dimension"
    ),
    "pad": Mixed(lambda call, _: [-1 - at // 2 for at, width in enumerate(call.get("pad")) if width], "input pad"),
    "diagonal": Mixed(lambda call, _: (call.get("dim1", 0), call.get("dim2", 1)), "input offset dim1 dim2"),
    "interpolate": Mixed(lambda _, tensor: range(2, tensor.dim())),
    **dict.fromkeys(
        ("layer_norm", "rms_norm"),
        Mixed(lambda call, _: range(-len(call.get("normalized_shape")), 0), "input normalized_shape"),
    ),
    # statistics of each row of the batch; its weights may not have rows at all
    "group_norm": Mixed(lambda call, tensor: range(int(tensor is call.get("input")), tensor.dim())),
    "kron": Mixed(()),
    "searchsorted": Mixed(-1, "sorted_sequence elements|input|self"),  # of a list for each row
}
PROBES = 2, 3  # numbers of rows; any two will do


def mixing(watch: Watch, call: Call) -> Any:
    """Each row by itself; where the rows are afterwards, dimensions being moved, made or taken away, a probe tells."""
    for tensor in call.tensors:
        rows = watch.rows(tensor)
        if rows is not None and rows.dim in MIXES[call.name].of(call, tensor):
            if call.name in ("softmax", "log_softmax") and isinstance(call.get("dim"), int):
                return softmax_over_rows(watch, call, rows.dim)
            if call.name == "normalize":
                return _normalized(watch, call)
            if call.name in OVER_ROWS and tensor is call.get("input"):
                return OVER_ROWS[call.name](watch, call)
            raise NotExact(
                f"torch.{call.name} runs along the {rows.axis.name}, whose order and number are the whole graph's, not "
                "one rank's, and has no exact form that is known here; sum, mean, max, min, var, std, softmax, topk, "
                "median and quantile over rows have one, and so has what is done along other dimensions, to each row "
                "by itself. Sort edges before split_graph."
            )
    place = find_place(watch, call)
    if call.name == "kron" and all(watch.rows(tensor) is not None for tensor in call.tensors):
        raise NotExact(f"torch.kron multiplies every one of the {place.axis.name} with every other one.")
    dims = _dims_of_rows(watch, call)
    common = watch.common(call)
    result = common() if call.name in MATRICES else without_rows(watch, common, dims)  # a row of zeros has no inverse
    if call.in_place:
        return changed(watch, call.tensors[0], place.fresh)
    for tensor, dim in zip(tensors_in(result), dims):
        mark(tensor, Rows(place.axis, dim, place.fresh))
    return result


for _name in MIXES.keys() - {"linalg_solve", "searchsorted"}:  # have rules of their own
    rule(_name, takes=MIXES[_name].takes)(mixing)


def _normalized(watch: Watch, call: Call) -> Any:
    """Each column over its norm: `normalize(x, p, dim, eps)`."""
    x, p, dim = call.get("input"), call.get("p", 2.0), call.get("dim", 1)
    with watch.in_other_words():
        return x / x.norm(p, dim, keepdim=True).clamp_min(call.get("eps", 1e-12))


@dataclass(frozen=True)
class Sketch:
    """Sizes of a tensor, None for the number of rows, and its type."""

    sizes: tuple[int | None, ...]
    dtype: torch.dtype

    def drawn(self, num_rows: int) -> Tensor:
        """A tensor of such sizes, of unit matrices, which have inverses and roots, in a type that the CPU knows.

        Tensors of torch's `meta` device would do, but their first use takes seconds to import what it needs.
        """
        sizes = [num_rows if size is None else size for size in self.sizes]
        dtype = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        unit = torch.eye(*[1, 1, *sizes][-2:], dtype=dtype, device="cpu")
        return unit.view(unit.shape[2 - min(len(sizes), 2) :]).expand(sizes).contiguous()


def _dims_of_rows(watch: Watch, call: Call) -> tuple[int, ...]:
    """Where the rows of each tensor of the result are."""

    def sketched(value: Any) -> Any:
        if isinstance(value, Tensor):
            rows = watch.rows(value)
            return Sketch(
                tuple(None if rows and at == rows.dim else n for at, n in enumerate(value.shape)), value.dtype
            )
        return tuple(map(sketched, value)) if isinstance(value, (list, tuple)) else value

    kwargs = tuple((name, sketched(value)) for name, value in call.kwargs.items())
    dims = _probed(call.func, tuple(map(sketched, call.args)), kwargs)
    if None in dims:
        raise NotExact(f"torch.{call.name} joins rows with other dimensions, or with other rows.")
    return dims


@lru_cache(maxsize=1024)  # as slow as the call itself; models ask the same again and again
def _probed(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    """The one dimension of each result that changes with the number of rows; None if there is no such."""

    def shapes(num_rows: int) -> list[torch.Size]:
        def drawn(value: Any) -> Any:
            if isinstance(value, Sketch):
                return value.drawn(num_rows)
            return tuple(map(drawn, value)) if isinstance(value, tuple) else value

        result = func(*map(drawn, args), **{name: drawn(value) for name, value in kwargs})
        return [tensor.shape for tensor in tensors_in(result)]

    dims = []
    for few, more in zip(*map(shapes, PROBES)):
        changing = [dim for dim, (size, other) in enumerate(zip(few, more)) if size != other]
        dims.append(changing[0] if len(changing) == 1 else None)
    return tuple(dims)


@rule("linalg_solve", takes="A|input B")
def solve(watch: Watch, call: Call) -> Any:
    """Of each row a system. Torch tells vectors from matrices by lengths, which are others on each rank."""
    left, right = call.get("A"), call.get("B")
    if right.dim() > 1 and right.dim() != left.dim() - 1:
        return mixing(watch, call)
    if right.dim() > 1 and watch.rows(right) is None:
        raise NotExact("torch.linalg.solve for a matrix that is the same on every rank; give it as B.unsqueeze(0).")
    with watch.in_other_words():
        columns = right.view((1,) * (left.dim() - 2) + (-1, 1)) if right.dim() == 1 else right.unsqueeze(-1)
        return torch.linalg.solve(left, columns).squeeze(-1)


@rule("isin", takes="elements test_elements")
@rule("bucketize", takes="elements|input boundaries")
@rule("searchsorted", takes="sorted_sequence elements|input|self")
def among(watch: Watch, call: Call) -> Any:
    """Each number of rows by a list that is the same on every rank."""
    numbers = call.get("elements")
    if call.name == "searchsorted" and call.get("sorted_sequence").dim() > 1:  # a list for each row
        return mixing(watch, call)
    of_rows = [rows for tensor in call.tensors if (rows := watch.rows(tensor))]
    rows = watch.rows(numbers) if isinstance(numbers, Tensor) else None
    if rows is None or len(of_rows) > 1:
        raise NotExact(
            f"torch.{call.name} looks something up among {of_rows[-1].axis.name}, of which each rank has others; "
            "give it a list that is the same on every rank, for example rows.unique(): the values of all of them."
        )
    return mark(call(), rows.but())
