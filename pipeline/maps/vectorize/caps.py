"""Where a line ends: its free ends moved from the skeleton's tip to the end of the line that was drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.ends import fit_ends, mean_radius, retrace
from pipeline.maps.vectorize.network import Network

# (N,) x and y in pixels -> (N,) 1 on the drawing, 0 off it, -1 outside the mask.
Lookup = Callable[[FloatArray], NDArray[np.int8]]
# Rays cast along an end, by their place across the line in half widths, and how much shorter than the middle one a round cap makes them.
_RAYS = np.linspace(-0.85, 0.85, 9)
_ROUND = np.sqrt(1.0 - _RAYS**2)
# A cap narrower than this (half width, px) is a handful of pixels, of which the removal of noise takes the corners: its shape cannot be told.
THINNEST_CAP_PX = 3.2
STEP_PX = 0.5  # along a ray
TIP_NOISE_PX = 0.7  # standard deviation of a ray's end: the stairs of a clean outline and some raggedness


def move_ends(network: Network, lookup: Lookup) -> Network:
    """Move each free end to where its line ends.

    Rays are cast on, side by side, from behind the end, where the skeleton is still straight, to the first pixel off the drawing. A line
    whose middle ray leaves the mask ends at its border. A round cap reaches half a width beyond the end of its line, a flat one does not: of a
    line too thin to tell, the mean of the two is taken, of a wide one see `_end_of_wide_line`.
    """
    path, side = np.nonzero(network.degree[network.ends] == 1)
    if len(path) == 0:
        return network
    node = network.ends[path, side]
    radius = mean_radius(network)[path]
    fit = fit_ends(network, path, side, skip_px=radius + 1.0, window_px=np.maximum(12.0, 3.0 * radius))
    old = ((network.node_xy[node] - fit.base) * fit.direction).sum(axis=1)
    half_width = radius - 0.5
    longest_px = float((old + 2.0 * radius).max()) + 3.0
    reach, left_mask = _cast(fit.base[:, None], fit.direction, lookup, longest_px)
    tip, at_border = reach[:, 0], left_mask[:, 0]
    end = np.where(at_border, tip, tip - 0.5 * half_width)
    wide = (half_width >= THINNEST_CAP_PX) & ~at_border
    if wide.any():
        end[wide] = _end_of_wide_line(fit.base[wide], fit.direction[wide], half_width[wide], lookup, longest_px)
    # Else the line bends away, or is too thin to be cast along: the old end is the better one.
    straight = at_border | (tip >= old - np.maximum(radius - 2.0, 0.0))
    xy = network.node_xy.copy()
    xy[node[straight]] = (fit.base + end[:, None] * fit.direction)[straight]
    trim = np.ones_like(network.ends)
    trim[path[straight], side[straight]] = np.maximum(fit.skipped, 1)[straight]
    return retrace(network, xy, trim)


def _cast(start: FloatArray, direction: FloatArray, lookup: Lookup, longest_px: float) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Lengths (A, R) of rays from `start` (A, R, 2) along `direction` (A, 2) to the end of the drawing, and whether they end at the mask's border."""
    steps = np.arange(0.0, longest_px, STEP_PX)
    at = start[:, :, None] + steps[:, None] * direction[:, None, None]
    seen = lookup(at.reshape(-1, 2)).reshape(*start.shape[:2], len(steps))
    off = seen != 1
    off[..., -1] = True
    first = off.argmax(axis=2)
    return steps[first] - STEP_PX / 2, np.take_along_axis(seen, first[..., None], axis=2)[..., 0] == -1


def _end_of_wide_line(base: FloatArray, direction: FloatArray, half_width: FloatArray, lookup: Lookup, longest_px: float) -> FloatArray:
    """Expected distance (A,) of the line's end from its base (A, 2), given the lengths of rays side by side across its width.

    A flat cap makes rays of one length, a round one rays that end on a half circle around the line's end. Either has its least-squares
    end; they are weighted by the likelihoods of the residuals, which count once a pixel of the line's width. Rays that leave the mask say
    nothing.
    """
    across = (half_width[:, None] * _RAYS)[..., None] * np.stack([-direction[:, 1], direction[:, 0]], axis=1)[:, None]
    reach, left_mask = _cast(base[:, None] + across, direction, lookup, longest_px)
    told = ~left_mask
    number = np.maximum(told.sum(axis=1), 1)
    cap = half_width[:, None] * _ROUND
    ends, misfit = [], []
    for lengths in (reach, reach - cap):
        end = np.where(told, lengths, 0.0).sum(axis=1) / number
        ends.append(end)
        misfit.append(np.where(told, (lengths - end[:, None]) ** 2, 0.0).sum(axis=1) / number)
    flat, round_ = ends
    evidence = (misfit[0] - misfit[1]) * 2.0 * half_width / (2.0 * TIP_NOISE_PX**2)
    weight = 1.0 / (1.0 + np.exp(-np.clip(evidence, -50.0, 50.0)))
    return flat + weight * (round_ - flat)
