"""What becomes of events that cannot be used: asked of every command that runs a network."""

from dataclasses import dataclass
from typing import Literal

from domainpar.config.group import Group


@dataclass(frozen=True, kw_only=True)
class BadEvents(Group):
    """Events that are damaged, without truth, or too small for the ranks"""

    on_bad_event: Literal["fail", "skip"] = "fail"
    """An event that cannot be read, or has no truth to train on. fail: the command ends. skip: it is left out, said."""

    strict: bool = False
    """Refuse events of which a rank would own nothing, such as those with fewer tiles than ranks."""
