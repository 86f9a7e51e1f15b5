"""Correctness of a predicted topology: which line runs along, into or through which polygon.

A relation "segment n belongs to polygon m" is judged by length, because a network cuts a line into other segments than the map does. Every
related segment is divided into stretches of at most `STRETCH_M`. Polygons are paired one to one with labelled polygons (Chamfer distance of
their outlines at most `NEAR_M`, nearest pairs first). A predicted stretch is right when its polygon has a partner and its middle lies within
`NEAR_M` of a segment that the label relates to this partner; a labelled stretch is found under the same condition the other way round.
precision = right length / predicted length, recall = found length / labelled length.

A relation counts from the lower one of the scores of its line and its polygon on. Like every detector the map head lists many weak
candidates; the result is that of the score at which F1 is best, and names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray
from pipeline.evaluation.chamfer import Points, chamfer_matrix, close, resample_all
from pipeline.maps.store import MapLabel
from pipeline.models.prediction import MapPrediction

NEAR_M = 1.0
STRETCH_M = 0.5
OUTLINE_POINTS = 100
SCORES = tuple(np.round(np.arange(0.05, 1.0, 0.05), 2).tolist())

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Relations:
    """The related segments of one sample, cut into R stretches.

    Attributes:
        middle_m: (R,2) middles of the stretches.
        length_m: (R,) their lengths.
        polygon: (R,) number of the polygon.
        score: (R,) from which score on the relation exists; labels: 1.
    """

    middle_m: FloatArray
    length_m: FloatArray
    polygon: NDArray[np.int64]
    score: FloatArray


def evaluate_topology(ground_truth: Sequence[MapLabel], predictions: Sequence[MapPrediction]) -> dict[str, Any] | None:
    """precision, recall and F1 at the best score_threshold, and the number of labelled relations; None when no label holds a relation."""
    relations = sum(int(label.topology_matrix.sum()) for label in ground_truth)
    if relations == 0:
        return None
    totals = np.zeros((len(SCORES), 4))  # right, predicted, found and labelled length
    for label, prediction in zip(ground_truth, predictions, strict=True):
        totals += list(_lengths_m(label, prediction))
    right, predicted, found, labelled = totals.T
    precision = np.divide(right, predicted, out=np.zeros(len(SCORES)), where=predicted > 0)
    recall = found / labelled
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    row = {"precision": precision, "recall": recall, "F1": f1, "score_threshold": SCORES}
    return {**{name: float(values[best]) for name, values in row.items()}, "relations": relations}


def _lengths_m(label: MapLabel, prediction: MapPrediction) -> Iterator[tuple[float, float, float, float]]:
    """Right, predicted, found and labelled length of one sample at each of SCORES."""
    truth = cut_relations(label.line_segments, label.topology_matrix, np.ones(len(label.line_segments)), np.ones(len(label.polygons)))
    line_score, polygon_score = prediction.score[prediction.segment_line], prediction.score[prediction.polygon_line]
    guess = cut_relations(prediction.line_segments, prediction.topology_matrix, line_score, polygon_score)
    near = np.linalg.norm(guess.middle_m[:, None] - truth.middle_m[None], axis=2) <= NEAR_M + STRETCH_M / 2
    distance_m = chamfer_matrix(_outlines(prediction.polygons), _outlines(label.polygons), NEAR_M)
    for score in SCORES:
        partner = pair(np.where(polygon_score[:, None] >= score, distance_m, np.inf), NEAR_M)
        exists = guess.score >= score
        agree = near & exists[:, None] & (partner[guess.polygon][:, None] == truth.polygon[None])
        yield (
            float(guess.length_m[agree.any(axis=1)].sum()),
            float(guess.length_m[exists].sum()),
            float(truth.length_m[agree.any(axis=0)].sum()),
            float(truth.length_m.sum()),
        )


def cut_relations(segments_m: Points, matrix: NDArray[np.uint8], segment_score: Points, polygon_score: Points) -> Relations:
    """The relations of a topology matrix (S,M) over segments (S,2,2), with scores (S,) and (M,)."""
    segment, polygon = np.nonzero(matrix)
    ends = np.asarray(segments_m, dtype=np.float64)[segment]
    length_m = np.linalg.norm(ends[:, 1] - ends[:, 0], axis=1)
    pieces = np.maximum(1, np.ceil(length_m / STRETCH_M)).astype(np.int64)
    owner = np.repeat(np.arange(len(segment)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    share = ((number + 0.5) / pieces[owner])[:, None]
    score = np.minimum(segment_score[segment], polygon_score[polygon])
    middle_m = ends[owner, 0] * (1 - share) + ends[owner, 1] * share
    return Relations(middle_m, (length_m / pieces)[owner], polygon[owner], score[owner].astype(np.float64))


def pair(distances_m: FloatArray, limit_m: float) -> NDArray[np.int64]:
    """Partner (A,) of each row of (A,B) in a one-to-one pairing, nearest pairs first, within `limit_m`; -1 where there is none."""
    partner = np.full(distances_m.shape[0], -1, dtype=np.int64)
    free = np.ones(distances_m.shape[1], dtype=bool)
    rows, columns = np.nonzero(distances_m <= limit_m)
    for index in np.argsort(distances_m[rows, columns], kind="stable"):
        row, column = rows[index], columns[index]
        if partner[row] < 0 and free[column]:
            partner[row], free[column] = column, False
    return partner


def _outlines(polygons_m: Points) -> FloatArray:
    """Closed outlines (M,100,2) of polygons (M,K,2)."""
    return resample_all([close(polygon) for polygon in polygons_m], OUTLINE_POINTS)
