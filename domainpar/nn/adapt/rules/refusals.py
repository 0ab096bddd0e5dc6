"""Calls that are always refused on rows, with a text for each."""

from __future__ import annotations

from typing import Any

from domainpar.nn.adapt.calls import ASKED_BY_PYTHON, Call, words
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.watch import Watch, rule

# In a text, `{name}` is that of the call and `{rows}` the kinds of rows that it takes.
_TEXTS: dict[tuple[str, ...], str] = {
    # Values of one rank's rows: other ranks would decide otherwise.
    (
        *(f"python {name}" for name in ASKED_BY_PYTHON - {"len"}),
        *words("item tolist numpy is_nonzero equal allclose"),
    ): (
        "Python asks for values of {rows} ({name}), of which each rank has its own; take a sum, mean, min, max, any or "
        "all over the rows first: those are the whole graph's."
    ),
    ("histc", "unique_consecutive"): "torch.{name} looks at one rank's rows; use torch.bincount or torch.unique.",
    # No rule sees changes of memory.
    ("untyped_storage", "storage", "set data", "set", "resize"): (
        "torch.{name} takes rows by the memory they lie in, as invertible blocks do to give it back; switch that off: "
        "disable=True in GroupAddRev and its kin."
    ),
    ("data_ptr",): (
        "the address of {rows} in memory is asked for (data_ptr, by a kernel of your own or an extension): what it "
        "reads and writes there cannot be watched; switch to the torch form of that step."
    ),
    # A matrix of all nodes by all nodes.
    tuple(
        words(
            "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_compressed_tensor to_sparse to_sparse_coo "
            "to_sparse_csr _sparse_mm"
        )
    ): (
        "torch.{name}: a sparse matrix has rows and columns of the whole graph, which no rank has; give the layer "
        "edge_index, and weights of edges, which layers of PyG take as well."
    ),
    # Forces and penalties: a gradient that is itself differentiated, through the exchange.
    ("autograd.grad",): (
        "torch.autograd.grad in a forward pass (forces, gradient penalties): a part has only its share of such a "
        "gradient, and its own gradient would have to go through the exchange twice. Take gradients after the forward "
        "pass, of the sum over ranks."
    ),
    ("native_dropout",): "torch.native_dropout; use torch.nn.functional.dropout.",
    (
        "tensor",
        "as_tensor",
        "scalar_tensor",
    ): "torch.{name} is given rows; use clone(), to() or torch.stack.",
    # Nobody was seen to want these of rows, and others say the same.
    ("masked_scatter", "index_put"): "torch.{name}; use x[index] = values, or index_add.",
    ("masked_select",): "torch.masked_select; pick rows by a mask of rows, x[mask].",
    (
        "quantile",
        "nanquantile",
    ): "torch.{name}; take a mean and a deviation, or count with torch.bucketize.",
    ("column_stack", "dstack", "row_stack"): "torch.{name}; use torch.cat or torch.stack.",
    ("kron",): "torch.kron; write it as a product, (x.unsqueeze(-1) * y).flatten(1).",
}
_TEXT_OF_CALL = {name: text for names, text in _TEXTS.items() for name in names}


@rule(*_TEXT_OF_CALL)
def refused(watch: Watch, call: Call) -> Any:
    """No exact form."""
    axes = {rows.axis.name for tensor in call.tensors if (rows := watch.rows(tensor)) is not None}
    text = _TEXT_OF_CALL[call.name]
    raise NotExact(text.format(name=call.name.lstrip("_"), rows=" and ".join(sorted(axes))))
