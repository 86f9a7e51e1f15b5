"""The memory of the detection head between frames. It lives on the host, in numpy; the network sees it as inputs `det_anchors` and `det_features`.

Of the N instances the first are fixed anchors, the others are temporal slots. After a frame the most confident instances ("updated", 32 in the
reference) are written to slots with box, feature and score. The other occupied slots (up to 96) are only cached: their box moves with its velocity
and with the ego motion, their feature stays. A slot that was not rewritten for more than `max_misses` frames in a row is emptied. An empty slot
shows its fixed anchor and a zero feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DetectionConfig

Floats = NDArray[np.float32]
# A confident instance this near to a remembered one is the same object, m.
SAME_OBJECT_M = 2.0
# Below this score an instance is not worth remembering.
MIN_SCORE = 0.1


def move_boxes(boxes: Floats, transform: NDArray[np.float64], seconds: float) -> Floats:
    """Box states (T, 11) after `seconds` at constant velocity, seen from another frame.

    Args:
        boxes: box states in the old frame.
        transform: (4, 4) maps points of the old BEV frame to the new one.
        seconds: time from old to new, s.
    """
    rotation = transform[:3, :3]
    center = boxes[:, :3].astype(np.float64)
    center[:, :2] += boxes[:, 8:10] * seconds  # vertical speed is ignored: it is mostly noise
    heading = np.stack([boxes[:, 7], boxes[:, 6], np.zeros(len(boxes))], axis=1) @ rotation.T
    length = np.maximum(np.hypot(heading[:, 0], heading[:, 1]), 1e-6)
    moved = boxes.copy()
    moved[:, :3] = center @ rotation.T + transform[:3, 3]
    moved[:, 6], moved[:, 7] = heading[:, 1] / length, heading[:, 0] / length
    moved[:, 8:11] = boxes[:, 8:11] @ rotation.T
    return moved


class InstanceBank:
    """Temporal instances of one stream."""

    def __init__(self, config: DetectionConfig, anchors: Floats, channels: int) -> None:
        """`anchors` (N, 11): fixed anchors, then the anchors that empty temporal slots show."""
        self._config, self._anchors, self._channels = config, anchors, channels
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new scene starts."""
        slots = self._config.temporal_instances
        self._boxes = np.zeros((slots, self._anchors.shape[1]), dtype=np.float32)
        self._features = np.zeros((slots, self._channels), dtype=np.float32)
        self._scores = np.zeros(slots, dtype=np.float32)
        self._misses = np.zeros(slots, dtype=np.int64)
        self._occupied = np.zeros(slots, dtype=bool)
        self._ego2global: NDArray[np.float64] | None = None
        self._timestamp_us = 0

    @property
    def occupied(self) -> NDArray[np.bool_]:
        """(slots,) which temporal slots hold an instance."""
        return self._occupied.copy()

    def inputs(self, ego2global: NDArray[np.float64], timestamp_us: int) -> tuple[Floats, Floats]:
        """det_anchors (N, 11) and det_features (N, C) for a frame at pose `ego2global` (4, 4); the remembered instances are brought to its BEV
        frame.
        """
        if self._ego2global is not None:
            old2new = np.linalg.inv(ego2global) @ self._ego2global
            self._boxes = move_boxes(self._boxes, old2new, (timestamp_us - self._timestamp_us) * 1e-6)
        self._ego2global, self._timestamp_us = ego2global, timestamp_us
        anchors, features = self._anchors.copy(), np.zeros((len(self._anchors), self._channels), dtype=np.float32)
        first = len(anchors) - len(self._boxes)
        anchors[first:][self._occupied] = self._boxes[self._occupied]
        features[first:][self._occupied] = self._features[self._occupied]
        return anchors, features

    def update(self, boxes: Floats, scores: Floats, features: Floats) -> None:
        """Remember the outputs of the frame that `inputs` was last called for.

        Args:
            boxes: (N, 11) refined box states.
            scores: (N,) best class confidence.
            features: (N, C) instance features.
        """
        first = len(boxes) - len(self._boxes)
        rewritten = np.zeros(len(self._boxes), dtype=bool)
        for instance in self._most_confident(boxes, scores):
            slot = self._slot_for(int(instance) - first, boxes[instance], rewritten)
            if slot is None:
                continue
            self._boxes[slot], self._features[slot], self._scores[slot] = boxes[instance], features[instance], scores[instance]
            self._misses[slot], self._occupied[slot], rewritten[slot] = 0, True, True
        self._misses[~rewritten] += 1
        self._occupied &= self._misses <= self._config.max_misses

    def _most_confident(self, boxes: Floats, scores: Floats) -> list[int]:
        """The best `updated_instances`, skipping those that sit on a better one."""
        chosen: list[int] = []
        for instance in np.argsort(-scores, kind="stable"):
            if scores[instance] < MIN_SCORE or len(chosen) == self._config.updated_instances:
                break
            distance = np.linalg.norm(boxes[chosen, :2] - boxes[instance, :2], axis=1)
            if not (distance < 0.5 * SAME_OBJECT_M).any():
                chosen.append(int(instance))
        return chosen

    def _slot_for(self, own_slot: int, box: Floats, rewritten: NDArray[np.bool_]) -> int | None:
        """Its own slot, else the slot that remembers the same object, else an empty one, else the least confident; None if all were rewritten."""
        if own_slot >= 0 and self._occupied[own_slot] and not rewritten[own_slot]:
            return own_slot
        distance = np.where(self._occupied & ~rewritten, np.linalg.norm(self._boxes[:, :2] - box[:2], axis=1), np.inf)
        if len(distance) and distance.min() < SAME_OBJECT_M:
            return int(distance.argmin())
        rank = np.where(rewritten, np.inf, np.where(self._occupied, self._scores, -1.0))
        return int(rank.argmin()) if len(rank) and np.isfinite(rank.min()) else None

    def state(self) -> dict[str, Any]:
        """Everything remembered, as arrays, for a checkpoint."""
        pose = np.zeros((0, 4, 4)) if self._ego2global is None else self._ego2global[None]
        return {
            "boxes": self._boxes, "features": self._features, "scores": self._scores, "misses": self._misses, "occupied": self._occupied,
            "ego2global": pose, "timestamp_us": np.int64(self._timestamp_us),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Undo `state`."""
        for name in ("boxes", "features", "scores", "misses", "occupied"):
            setattr(self, f"_{name}", np.array(state[name]))
        pose = np.asarray(state["ego2global"])
        self._ego2global = pose[0] if len(pose) else None
        self._timestamp_us = int(state["timestamp_us"])
