"""Fitted parameters of found tracks against the truth: resolutions and pulls in bins, and the charts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from domainpar.common.words import several
from domainpar.tracking.display.chart import Chart, ChartAxis, Panel, log_axis
from domainpar.tracking.display.event_data import EventData
from domainpar.tracking.display.finders import Finder, RateCurve, axis_of, series_of
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.reco.performance.counts import EDGES, bins_of
from domainpar.tracking.reco.performance.layers import median_and_width
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import true_perigees
from domainpar.tracking.reco.truth_check import matched

LABELS = {"d0": "d0 [mm]", "z0": "z0 [mm]", "phi": "φ [rad]", "theta": "θ [rad]", "qop": "(q/p) / (q/p)"}
FEWEST = 20
"""Bins with fewer tracks are left out."""

ABOUT = (
    "Tracks are those of which enough hits are of one target particle. They are compared with it at the beam line, to "
    "which the true particle is followed in the field, without material; against pT of targets of any pT. Where the "
    "store does not know the direction of particles, there are no d0, z0 and φ. Bins with fewer than "
    f"{FEWEST} tracks are left out."
)
CHARTS = {
    "track-resolution": (
        "σ of ",
        "Resolution",
        "Half of the interval that holds 68.3 % of the differences from the truth. ",
    ),
    "track-pulls": (
        "width of the pull of ",
        "Pulls",
        "Differences from the truth over the error that the fit gives: half of the interval that holds 68.3 %, which "
        "is 1 where errors are right. ",
    ),
    "track-bias": ("median pull of ", "Bias", "The median of the pulls, which is 0 without a bias. "),
}
"""Charts: what they show of a parameter, heading and caption."""


def differences(event: EventData, finder: str, cuts: TrackCuts) -> FloatArray | None:
    """The tracks of an event that match a target of any pT, float64 [n, 13]; None without parameters or truth.

    Columns are pt and eta of the particle, whether it is a target with its pT, differences from the truth, of q/p
    relative to it, and pulls.
    """
    tracks = None if event.scores is None else event.scores.tracks.get(finder)
    if (truth := event.truth) is None or event.particles is None or tracks is None or tracks.fits is None:
        return None
    track, ids = matched(truth, tracks.track_id, tracks.shared_hits, cuts, cuts.target_without_pt)
    true = true_perigees(truth, ids)
    difference = tracks.fits.value[track] - true
    difference[:, 2] = (difference[:, 2] + np.pi) % (2 * np.pi) - np.pi
    pulls = difference / np.sqrt(np.einsum("tii->ti", tracks.fits.covariance[track]))
    difference[:, 4] /= np.abs(true[:, 4])
    pt, eta = (rows_of_table(truth.particles, ids, name) for name in ("pt", "eta"))
    return np.column_stack([pt, eta, truth.targets_among(ids, cuts.target), difference, pulls])


def differences_of(run: RunFiles, splits: Sequence[str], finders: Sequence[Finder]) -> dict[str, FloatArray]:
    """Those of the events of some splits, by finder; of none that has no parameters in one of them."""
    rows: dict[str, list[FloatArray | None]] = {finder.name: [] for finder in finders if not finder.other}
    for record in run.events_to_read(splits)[0]:
        event = run.read_event(record)
        for name, of_events in rows.items():
            of_events.append(differences(event, name, run.tracking.cuts))
    return {
        name: np.concatenate([one for one in of_events if one is not None])
        for name, of_events in rows.items()
        if of_events and all(one is not None for one in of_events)
    }


def curve_of(values: FloatArray, bins: IntArray, edges: tuple[float, ...], middle: bool) -> RateCurve:
    """The median of values in each bin, or half of their interval of 68.3 %, with the standard error that normal values
    would give it; NaN with too few."""
    whole, value, error = (np.full(len(edges) - 1, empty) for empty in (0.0, np.nan, np.nan))
    for number in range(len(whole)):
        of_bin = values[(bins == number) & np.isfinite(values)]
        whole[number] = len(of_bin)
        if len(of_bin) >= FEWEST:
            median, width = median_and_width(of_bin)
            value[number] = median if middle else width
            error[number] = (1.25 if middle else 0.96) * width / len(of_bin) ** 0.5
    return RateCurve(np.array(edges), np.full(len(whole), np.nan), whole, value, value - error, value + error)


def resolution_charts(run: RunFiles, splits: Sequence[str], finders: Sequence[Finder], title: str) -> tuple[Chart, ...]:
    """Resolutions and pulls against pT and eta; none without parameters."""
    found: Mapping[str, FloatArray] = differences_of(run, splits, finders)
    measured = [finder for finder in finders if not finder.other and finder.name in found]
    left_out, charts = run.events_to_read(splits)[1], []
    if not measured:
        return ()
    for chart, (words, heading, caption) in CHARTS.items():
        panels = []
        for column, (name, label) in enumerate(LABELS.items()):
            for place, quantity in enumerate(("pt", "eta")):
                series, edges = [], EDGES[quantity]
                for number, finder in enumerate(measured):
                    rows = found[finder.name]
                    rows = rows if quantity == "pt" else rows[rows[:, 2] > 0]
                    values = rows[:, (3 if chart == "track-resolution" else 8) + column]
                    curve = curve_of(values, bins_of(rows[:, place], edges), edges, chart == "track-bias")
                    series.append(series_of(finder, curve, quantity, number, len(measured)))
                values = np.concatenate([one.y for one in series])
                far = 1.15 * np.max(np.abs(values[np.isfinite(values)]), initial=0.0)
                y = ChartAxis(words + label.split(" [")[0], 0.0, max(2.0, far))
                if chart == "track-bias":
                    y = ChartAxis(y.label, -max(1.0, far), max(1.0, far))
                elif chart == "track-resolution":
                    y = log_axis(words + label, values)
                x = axis_of(quantity, np.array(edges), series)
                panels.append(Panel(f"{name}-{quantity}", tuple(series), x, y))
        more = f" {several(left_out, 'more event')} not counted here." if left_out else ""
        line, words = title.partition(", 68.3 %")[0], caption + ABOUT + more
        charts.append(Chart(chart, line, tuple(panels), heading=heading, caption=words))
    return tuple(charts)
