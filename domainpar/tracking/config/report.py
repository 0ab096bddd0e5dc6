"""The flags of `report`."""

from dataclasses import dataclass

from domainpar.tracking.config.group import Bounded, Group, MeansNothing, rules


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Group):
    """What to show, and where the report goes"""

    run: str | None = None
    """Directory of a training run, or pretrained:NAME; also without the flag. Default: the one in runs/ that was
    started last."""

    beside: str | None = None
    """Directory of another run, or pretrained:NAME, to be laid beside it: flags that differ, metrics, curves; also
    without the flag, behind the first. What was not counted alike is said."""

    naive: str | None = None
    """Directory of a naive run, also scored with --mode naive, to be laid beside it. One of another kind, or that was
    not counted alike, is refused."""

    event: str | None = None
    """Name of the event to look into. Default: the first that training did not see."""

    parts: int | None = None
    """Parts to split that event into. Default: the ranks of the run that shared an event, its sectors, or 8."""

    scores: str | None = None
    """Directory of the scores. Default: scores/ in the run's directory."""

    store: str | None = None
    """Store of the events. Default: where scores or run say it is."""

    out: str | None = None
    """File to write. Default: report.html in the run's directory."""

    png: str | None = None
    """Directory for the same as PNG pictures, besides the page."""

    WORDS = ("run", "beside")

    RULES = rules(
        Bounded("parts", least=1, below=1025),
        MeansNothing("beside", beside="naive", hint="one run can lie beside another: drop one of them"),
    )
