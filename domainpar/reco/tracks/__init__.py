"""Tracks from the scores of segments: no rank ever holds the event, and the tracks do not depend on the ranks."""

from domainpar.reco.tracks.building import TrackBuilder, gather_tracks
from domainpar.reco.tracks.options import METHODS, TrackOptions

__all__ = ["METHODS", "TrackBuilder", "TrackOptions", "gather_tracks"]
