"""The sources of events by name; `sources.open_source` opens them, and one more, `scores`, lies above this room."""

from typing import Literal

KindOfHits = Literal["simulate", "trackml", "colliderml"]
"""Hits, which are selected and joined here."""

KindOfGraphs = Literal["heptrkx", "pyg", "acorn"]
"""Graphs, joined already."""

SourceKind = Literal[KindOfHits, KindOfGraphs]
