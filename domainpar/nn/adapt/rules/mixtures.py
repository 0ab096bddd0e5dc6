"""Calls that combine numbers along some dimensions: exact for each row if the rows lie along another dimension."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from domainpar.nn.adapt.calls import Call, words
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, mark
from domainpar.nn.adapt.rules.elementwise import changed, find_place, without_rows
from domainpar.nn.adapt.rules.reductions import softmax_over_rows
from domainpar.nn.adapt.watch import Watch, rule


class Mixed(NamedTuple):
    """The dimensions that a call mixes.

    Attributes:
        default: Those that it mixes if it is not told; None for all. Or a function of the call and one of its tensors.
        takes: Its arguments; the one that begins with `dim` tells the dimensions.
        reduces: Whether the result is without them, unless `keepdim` says otherwise. All other dimensions that are made
            or taken away lie behind the rows.
    """

    default: int | tuple[int, ...] | Callable[[Call, Tensor], Iterable[int]] | None
    takes: str = "input"
    reduces: bool = False

    def of(self, call: Call, tensor: Tensor) -> Collection[int]:
        """The dimensions of one of the call's tensors."""
        if callable(self.default):
            dims: Any = self.default(call, tensor)
        else:
            name = next((name for name in self.takes.split() if name.startswith("dim")), None)
            dims = call.get(name, self.default) if name else self.default
        dims = range(tensor.dim()) if dims is None else (dims,) if isinstance(dims, int) else dims
        # A dimension from the front is one of all that takes part, made as long as its longest: seen from behind.
        longest = max(each.dim() for each in call.tensors) if call.name in BROADCASTING else tensor.dim()
        dims = [dim - longest if dim >= 0 and longest > tensor.dim() else dim for dim in dims]
        return {dim % tensor.dim() for dim in dims if -tensor.dim() <= dim < tensor.dim()}


MATRICES = words(
    "cholesky cholesky_inverse cholesky_solve det inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det "
    "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor "
    "linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve "
    "linalg_solve_triangular linalg_svd linalg_svdvals logdet matrix_exp matrix_power pinverse qr slogdet svd tril triu"
)
BROADCASTING = words("cosine_similarity linalg_vecdot linalg_cross cross")
MIXES = {
    **dict.fromkeys(words("argsort cummax cummin glu log_softmax softmax softmin sort"), Mixed(-1, "input dim")),
    **dict.fromkeys(words("cumprod cumsum logcumsumexp"), Mixed(None, "input dim")),
    **dict.fromkeys(words("diff linalg_cross"), Mixed(-1, "input by dim")),
    "topk": Mixed(-1, "input by|k dim"),
    "kthvalue": Mixed(-1, "input by|k dim keepdim", reduces=True),
    "cosine_similarity": Mixed(1, "input by dim", reduces=True),
    "linalg_vecdot": Mixed(-1, "input by dim", reduces=True),
    "normalize": Mixed(1, "input p dim eps"),
    "cross": Mixed(None, "input by dim"),
    **dict.fromkeys((*MATRICES, "cdist", "fold", "linalg_diagonal"), Mixed((-2, -1), "input|A")),
    **dict.fromkeys(words("pairwise_distance view_as_complex"), Mixed(-1)),
    "view_as_real": Mixed(()),
    **dict.fromkeys(words("fft_fft fft_ifft fft_rfft fft_irfft"), Mixed(-1, "input by dim")),
    "roll": Mixed(None, "input by dims"),
    **dict.fromkeys(words("median nanmedian mode nansum nanmean prod"), Mixed(None, "input dim keepdim", reduces=True)),
    "linalg_matrix_norm": Mixed((-2, -1), "input|A ord dim keepdim", reduces=True),
    # of pictures, in torch.nn.functional, or of a tensor along a dimension
    "unfold": Mixed(
        lambda call, _: call.get("dimension", 0) if call.func is Tensor.unfold else (-3, -2, -1), "input dimension"
    ),
    "pad": Mixed(lambda call, _: [-1 - at // 2 for at, width in enumerate(call.get("pad")) if width], "input pad"),
    "diagonal": Mixed(
        lambda call, _: (call.get("dim1", 0), call.get("dim2", 1)), "input offset dim1 dim2", reduces=True
    ),
    "diag_embed": Mixed(
        lambda call, tensor: (-1,) if (call.get("dim1", -2), call.get("dim2", -1)) == (-2, -1) else range(tensor.dim()),
        "input offset dim1 dim2",
    ),
    "interpolate": Mixed(lambda _, tensor: range(2, tensor.dim())),
    **dict.fromkeys(
        ("layer_norm", "rms_norm"),
        Mixed(lambda call, _: range(-len(call.get("normalized_shape")), 0), "input normalized_shape"),
    ),
    # statistics of each row of the batch; its weights may not have rows at all
    "group_norm": Mixed(lambda call, tensor: range(int(tensor is call.get("input")), tensor.dim())),
    "searchsorted": Mixed(-1, "sorted_sequence elements|input|self"),  # of a list for each row
}


def mixing(watch: Watch, call: Call) -> Any:
    """Each row by itself."""
    mixed = MIXES[call.name]
    for tensor in call.tensors:
        rows = watch.rows(tensor)
        if rows is not None and rows.dim in mixed.of(call, tensor):
            if call.name in ("softmax", "log_softmax") and isinstance(call.get("dim"), int):
                return softmax_over_rows(watch, call, rows.dim)
            if call.name == "normalize":
                return _normalized(watch, call)
            raise NotExact(
                f"torch.{call.name} runs along the {rows.axis.name}, whose order and number are the whole graph's, not "
                "one rank's, and has no exact form that is known here; sum, mean, max, min, var, std and softmax over "
                "rows have one, and so has what is done along other dimensions, to each row by itself. Sort edges "
                "before split_graph."
            )
    place = find_place(watch, call)
    longest = max(call.tensors, key=Tensor.dim)
    dim = longest.dim() - place.from_end
    if mixed.reduces and not call.get("keepdim", False):
        dim -= sum(each < dim for each in mixed.of(call, longest))
    common = watch.common(call)
    result = common() if call.name in MATRICES else without_rows(watch, common, dim)  # a row of zeros has no inverse
    if call.in_place:
        return changed(watch, call.tensors[0], place.fresh)
    for tensor in tensors_in(result):
        mark(tensor, Rows(place.axis, dim, place.fresh))
    return result


for _name in MIXES.keys() - {"linalg_solve", "searchsorted"}:  # have rules of their own
    rule(_name, takes=MIXES[_name].takes)(mixing)


def _normalized(watch: Watch, call: Call) -> Any:
    """Each column over its norm: `normalize(x, p, dim, eps)`."""
    x, p, dim = call.get("input"), call.get("p", 2.0), call.get("dim", 1)
    with watch.in_other_words():
        return x / x.norm(p, dim, keepdim=True).clamp_min(call.get("eps", 1e-12))


@rule("linalg_solve", takes="A|input B")
def solve(watch: Watch, call: Call) -> Any:
    """Of each row a system. Torch tells vectors from matrices by lengths, which are others on each rank."""
    if call.get("A").dim() != call.get("B").dim():
        raise NotExact(
            "torch.linalg.solve of another number of dimensions on each side; give A.unsqueeze(0), or vectors as "
            "B.unsqueeze(-1)."
        )
    return mixing(watch, call)


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
