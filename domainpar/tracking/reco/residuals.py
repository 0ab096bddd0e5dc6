"""The distance of each hit from the helix that is fitted to all hits of its track."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.helix import distance_from_helix, fit_helices


def residuals(position: FloatArray, track_id: IntArray, num_tracks: int) -> npt.NDArray[np.float64]:
    """Distance of hits from their helices in mm, by `distance_from_helix`: across in the transverse plane, and along z.

    Args:
        position: x, y, z of each hit in mm, [N, 3].
        track_id: Track of each hit, in [0, num_tracks), or -1 for none, [N].
        num_tracks: Number of tracks T.

    Returns:
        float64 [N, 2]; NaN on no track, and on one without a fit.

    Raises:
        ValueError: As `fit_helices`.
    """
    helices = fit_helices(position, track_id, num_tracks, 1.0)  # circles are those of hits, whatever the field
    rho = helices.charge * GEV_PER_TESLA_MM / helices.pt
    table = np.stack([rho, helices.phi, -helices.d0, helices.z0, np.sinh(helices.eta)], axis=1)
    return np.asarray(_residuals(np.ascontiguousarray(position, np.float64), track_id, table))


@compiled
def _residuals(position: Any, track: Any, helices: Any) -> Any:
    off = np.full((len(position), 2), np.nan)
    for i in range(len(position)):
        if track[i] >= 0:
            rho, phi, d, z0, slope = helices[track[i]]
            off[i] = distance_from_helix(position[i], rho, phi, d, z0, slope)
    return off
