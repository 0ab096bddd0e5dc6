"""What the survey of PyG's modules runs: a case for every way a layer may be built and called.

A case is a module and a call of it on the whole graph. It knows nothing of ranks: the survey gives the same case a
whole `Sample` and a part of one, and compares. Calls use fields of the sample only, take every row count from
`s.x.size(0)`, and return one tensor. torch_geometric takes seconds to import, so nothing that starts a command imports
this package.
"""

from __future__ import annotations

from survey_cases import attention, gcn_family, messages, models, norms_and_readouts, relations
from survey_cases.case import Case, by_name

TOLERANCE = 1e-12
"""How far a result may be off and still be called exact, relative to the largest number of its kind; in float64."""

SINGLE = 1e-6
"""The same where some of the work is done in float32 whatever the dtype."""

CONVOLUTIONS: dict[str, list[Case]] = by_name(
    [*messages.user_layers(), *gcn_family.cases(), *messages.of_pyg(), *attention.cases(), *relations.cases()]
)
"""Cases of each convolution of torch_geometric that can be run here, by class."""

_KNN = "finds its own edges with pyg-lib (>= 0.6), which has no wheel among our dependencies"
CANNOT_RUN: dict[str, str] = {
    "CuGraphSAGEConv": "needs pylibcugraphops, on a GPU only",
    "CuGraphGATConv": "needs pylibcugraphops, on a GPU only",
    "CuGraphRGCNConv": "needs pylibcugraphops, on a GPU only",
    "FusedGATConv": "needs dgNN, on a GPU only",
    "DynamicEdgeConv": _KNN,
    "GravNetConv": _KNN,
    "XConv": _KNN,
    "SplineConv": "needs the spline kernels of pyg-lib (>= 0.6)",
    "PANConv": "multiplies sparse matrices of torch-sparse",
}
"""Why a convolution has no case."""

MODELS: list[Case] = [*models.basic_gnns(), *models.other_gnns()]
"""Models of torch_geometric's BasicGNN family: 3 layers, hidden 16."""

WHOLE_MODELS: dict[str, list[Case]] = by_name([*MODELS, *models.with_shapes_of_their_own(), *models.made_of_layers()])
"""Whole models of torch_geometric and modules made of layers, by class, as in `docs/reference/models.md`."""

MODULES: list[Case] = [
    *norms_and_readouts.norms(),
    *norms_and_readouts.pools(),
    *norms_and_readouts.readouts(),
    *models.made_of_layers(),
]
"""Norms, pooling, readouts and modules made of layers; classes of our own stand for what users write."""
