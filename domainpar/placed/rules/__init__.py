"""Rules by families of ATen's calls. Importing this room fills the table of `placed.dispatch`."""

from domainpar.placed.rules import (  # noqa: F401
    each_row,
    indexing,
    joining,
    matrix_products,
    new_tensors,
    pointwise,
    random,
    reductions,
    scatters,
    views,
)
