"""The flags of `export`."""

from dataclasses import dataclass
from typing import Literal

from domainpar.tracking.config.group import Bounded, Group, rules


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Group):
    """What to export, as what, and how it is checked"""

    run: str | None = None
    """Directory of a training run, or pretrained:NAME; also without the flag. Default: the one in runs/ that was
    started last."""

    format: Literal["onnx", "pt2"] = "onnx"
    """onnx: for ONNX runtime, as ACTS reads it. pt2: a program of torch.export, for torch in Python or C++."""

    out: str | None = None
    """File to write. Default: model.onnx or model.pt2 in the run's directory."""

    checkpoint: Literal["best", "last"] = "best"
    """best: the weights with the best validation metric. last: the newest."""

    model: str | None = None
    """package.module:factory again, if the run's network is code of your own."""

    store: str | None = None
    """Store of the event that the file is checked on. Default: the one the run was trained on."""

    event: str | None = None
    """Name of that event. Default: the first that training did not see, else the first."""

    tolerance: float = 4.0
    """How far a logit y may be from that in float64, over 1 + |y|: so many times as far as the same network in float32
    is, at the worst edge of the event."""

    WORDS = ("run",)

    RULES = rules(Bounded("tolerance", positive=True))
