"""What the cells of a TrackML hit tell: size, charge and direction of its cluster, as node features.

`event000001001-cells.csv` lists the cells that fired, `detectors.csv` (one for all events) pitch and thickness of each
module. A particle that crosses a module at a slant fires more cells: the angle is that of a straight line through as
many cells and the whole thickness, without its sign, which cells do not tell.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace
from partitioners.topology import FloatArray


def cluster_features(hits: pd.DataFrame, cells: pd.DataFrame, modules: pd.DataFrame, place: EventPlace) -> FloatArray:
    """The features of each hit, `features.OF_CLUSTERS`, float32 [N, 6].

    Args:
        hits: Columns hit_id, volume_id, layer_id, module_id, [N].
        cells: Columns hit_id, ch0, ch1, value, a row for each cell.
        modules: Columns volume_id, layer_id, module_id, module_t (half the thickness), pitch_u, pitch_v in mm, a row
            for each module.
        place: The event and the file of its cells.

    Raises:
        Problem: If a hit has no cell, or its cells no charge, or a module is not listed.
    """
    of_hits = cells.groupby("hit_id").agg(
        cells=("ch0", "size"), charge=("value", "sum"), u0=("ch0", "min"), u1=("ch0", "max"), v0=("ch1", "min"),
        v1=("ch1", "max"),
    )  # fmt: skip
    clusters = of_hits.reindex(hits["hit_id"])
    without = ~(clusters["charge"].to_numpy() > 0)
    if without.any():
        first = hits["hit_id"].to_numpy()[without][0]
        raise place.problem(
            f"{int(without.sum())} of {len(hits)} hits have no cell with a charge here, the first is hit_id {first}",
            "the file is truncated or of another event; leave --cluster-features out",
        )
    names = ["volume_id", "layer_id", "module_id"]
    of_modules = modules.set_index(names).reindex(pd.MultiIndex.from_frame(hits[names]))
    unknown = of_modules["module_t"].isna().to_numpy()
    if unknown.any():
        first = tuple(hits[names].to_numpy()[unknown][0].tolist())
        raise place.problem(
            f"detectors.csv does not list the module of {int(unknown.sum())} hits, the first is "
            f"volume, layer, module {first}",
            "take the file of the same detector",
        )
    thickness = 2 * of_modules["module_t"].to_numpy()
    columns = [np.log(clusters["cells"].to_numpy(float)), np.log(clusters["charge"].to_numpy())]
    sizes = [
        (clusters[f"{axis}1"] - clusters[f"{axis}0"] + 1).to_numpy() * of_modules[f"pitch_{axis}"].to_numpy()
        for axis in "uv"
    ]
    angles = [np.arctan2(size, thickness) for size in sizes]
    return np.stack([*columns, *sizes, *angles], axis=1).astype(np.float32)
