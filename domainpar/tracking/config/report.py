"""The flags of `report`."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from domainpar.tracking.config.group import Group


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Group):
    """What to show, and where the report goes"""

    run: str | None = None
    """Directory of a training run, or pretrained:NAME; may stand without the flag. Default: the run in runs/ that was
    started last."""

    beside: str | None = None
    """Directory of a second run, or pretrained:NAME, to compare with: flags that differ, metrics and curves. It may
    stand without the flag, after the first run. The page says what was not counted alike."""

    event: str | None = None
    """Name of the event to draw. Default: the first that was not trained on."""

    parts: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Number of parts to split that event into. Default: the number of ranks that shared an event, or of sectors, else
    8."""

    scores: str | None = None
    """Directory of the scores. Default: scores/ in the run's directory."""

    store: str | None = None
    """Store of the events. Default: the one that the scores or the run name."""

    out: str | None = None
    """File to write. Default: report.html in the run's directory."""

    png: str | None = None
    """Directory for the charts as PNG pictures, besides the page."""

    WORDS = ("run", "beside")
