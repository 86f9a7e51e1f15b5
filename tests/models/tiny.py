"""A network of the real structure that runs in milliseconds."""

from __future__ import annotations

from typing import Any

from pipeline.config import ModelConfig, merge

TINY: dict[str, Any] = {
    "image_size": [64, 96],
    "backbone": {"depths": [1, 1, 2, 1], "widths": [16, 16, 32, 32], "blocks": ["DWCB", "GroupDWCB", "AltDWCB", "DWCB"]},
    "neck": {"channels": 16, "out_strides": [8, 16]},
    "view": {
        "x_range_m": [-16.0, 16.0], "y_range_m": [-16.0, 16.0], "cells": [16, 16], "heights_m": [0.0, 1.5], "cameras_per_point": 2,
        "depth_bins": 8, "feature_stride": 8, "depth_stride": 16, "depth_range_m": [1.0, 32.0], "lift_channels": 8, "channels": 16,
        "encoder_depth": 1,
    },
    "detection": {"anchors": 24, "temporal_instances": 8, "updated_instances": 4, "key_points": 5, "groups": 2, "feature_stride": 16},
    "map": {"num_query": 12, "sample_points": 8, "layers": 2, "sample_cameras": True},
    "occupancy": {
        "levels": [
            {"x_range_m": [-16.0, 16.0], "y_range_m": [-16.0, 16.0], "z_range_m": [-1.0, 5.4], "cells": [16, 12, 4]},
            {"x_range_m": [-8.0, 8.0], "y_range_m": [-8.0, 8.0], "z_range_m": [-1.0, 1.0], "cells": [8, 8, 2]},
        ],
        "channels": 16,
    },
}  # fmt: skip


def tiny_config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(merge(TINY, changes))
