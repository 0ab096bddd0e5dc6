"""The flags of `import_acorn`."""

from dataclasses import dataclass

from domainpar.tracking.config.group import ConfigError, Group


@dataclass(frozen=True, kw_only=True)
class ImportAcornConfig(Group):
    """The checkpoint, and the run that it becomes"""

    checkpoint: str | None = None
    """Checkpoint of one of acorn's interaction networks, .ckpt; may stand without the flag."""

    out: str | None = None
    """Directory of the run. Default: a new numbered one in runs/."""

    WORDS = ("checkpoint",)

    def check(self) -> None:
        """Refuse nothing to read."""
        if self.checkpoint is None:
            raise ConfigError("no checkpoint is named", "python -m domainpar.import_acorn gnn.ckpt")
