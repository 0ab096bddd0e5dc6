"""The flags of `export`."""

from dataclasses import dataclass
from typing import Literal

from domainpar.tracking.config.group import Group, Positive


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Group):
    """What to export, as what, and how it is checked"""

    run: str | None = None
    """Directory of a training run, or pretrained:NAME; may stand without the flag. Default: the run in runs/ that was
    started last."""

    format: Literal["onnx", "pt2"] = "onnx"
    """onnx: for ONNX runtime, as ACTS reads it. pt2: a program of torch.export, for torch in Python or C++."""

    out: str | None = None
    """File to write. Default: model.onnx or model.pt2 in the run's directory."""

    checkpoint: Literal["best", "last"] = "best"
    """best: the weights with the best validation metric. last: the newest."""

    model: str | None = None
    """package.module:factory once more, if the network of the run is code of your own."""

    store: str | None = None
    """Store of the event that the file is checked on. Default: the one the run was trained on."""

    event: str | None = None
    """Name of that event. Default: the first that was not trained on, else the first."""

    tolerance: Positive = 4.0
    """Allowed distance of a logit y from the same logit in float64, over 1 + |y|, as a multiple of the largest such
    distance of the same network in float32 and plain torch."""

    WORDS = ("run",)
