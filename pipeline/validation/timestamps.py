"""Time stamps: phase and jitter of the cameras, gaps, order, chains, and how well the ego poses fit them.

In a spinning-lidar rig the cameras fire one after another as the beam passes, so six images of a sample are 40 ms apart by design. What
must hold is that each camera keeps its own *phase*, the time from the lidar key frame to its image. The *usual phase* of a camera is the
median over the samples of the same vehicle; the *jitter* of an image is its deviation from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.build import matrices, timestamps_us
from pipeline.dataset.geometry import FloatArray
from pipeline.dataset.tables import positions, read_frame_links
from pipeline.taxonomy import CAMERAS, LIDAR
from pipeline.validation.context import Context, IntArray, chain_problems, frame_sample, problems, scene_of_sample, vehicle_of_sample

MS_PER_US = 1e-3


def measure_frames(context: Context) -> pa.Table:
    """One row a key frame: phase_ms, jitter_ms (cameras, else null), ego_age_ms, pose_error_m, motion_m, pose_problem, order_problem."""
    frames = context.index.frames
    sample = frame_sample(context)
    is_camera = pc.is_in(frames["channel"], value_set=pa.array(CAMERAS)).to_numpy()
    phase_ms = MS_PER_US * (frames["timestamp_us"].to_numpy() - reference_us(context)[sample])
    jitter_ms = np.abs(phase_ms - _usual_phase(context, sample, phase_ms))
    ego2global = matrices(frames["ego2global"], 4)
    bev = matrices(context.index.samples["ego2global"], 4)[sample]
    return pa.table(
        {
            "token": frames["token"],
            "sample_token": frames["sample_token"],
            "channel": frames["channel"],
            "phase_ms": pa.array(phase_ms, mask=~is_camera),
            "jitter_ms": pa.array(jitter_ms, mask=~is_camera),
            "ego_age_ms": MS_PER_US * np.abs(frames["ego_timestamp_us"].to_numpy() - frames["timestamp_us"].to_numpy()),
            "pose_error_m": _null_nan(pose_error_m(context)),
            "motion_m": _null_nan(np.linalg.norm(ego2global[:, :3, 3] - bev[:, :3, 3], axis=1)),
            "pose_problem": problems(len(sample), [("ego pose is not finite", ~np.isfinite(ego2global).all(axis=(1, 2)))]),
            "duplicate_problem": problems(len(sample), [("second key frame of this channel in the sample", _repeats(sample, frames["channel"]))]),
        }
    )


def _null_nan(values: FloatArray) -> pa.Array:
    return pa.array(values, mask=~np.isfinite(values))


def reference_us(context: Context) -> IntArray:
    """Reference time of each sample: its LIDAR_TOP key frame, else the sample's own time stamp."""
    stamps = context.index.samples["timestamp_us"].to_numpy().copy()
    is_lidar = pc.equal(context.index.frames["channel"], LIDAR).to_numpy()
    stamps[frame_sample(context)[is_lidar]] = context.index.frames["timestamp_us"].to_numpy()[is_lidar]
    return stamps


def _usual_phase(context: Context, sample: IntArray, phase_ms: FloatArray) -> FloatArray:
    """Median phase of each frame's channel on its vehicle, ms."""
    rig = vehicle_of_sample(context)[sample] + "/" + context.index.frames["channel"].to_numpy(zero_copy_only=False)
    _, group = np.unique(rig.astype(str), return_inverse=True)
    medians = np.array([np.median(phase_ms[group == number]) for number in range(group.max(initial=-1) + 1)])
    return medians[group] if len(group) else phase_ms


def pose_error_m(context: Context) -> FloatArray:
    """Residual motion error of each key frame in metres, NaN where it cannot be judged.

    The pose that places the frame is compared with the trajectory of the scene at the frame's time stamp, interpolated linearly between the
    poses before and after it (of any sensor, the frame's own left out). A pose of a wrong time, or a wrong pose, shows as metres.
    """
    frames = context.index.frames
    scene = scene_of_sample(context)[frame_sample(context)]
    pose_us, position_m = frames["ego_timestamp_us"].to_numpy(), matrices(frames["ego2global"], 4)[:, :3, 3]
    order = np.lexsort((pose_us, scene))
    error = np.full(len(order), np.nan)
    before, here, after = order[:-2], order[1:-1], order[2:]
    span = pose_us[after] - pose_us[before]
    fits = (scene[before] == scene[after]) & (span > 0)
    before, here, after, span = before[fits], here[fits], after[fits], span[fits]
    share = (frames["timestamp_us"].to_numpy()[here] - pose_us[before]) / span
    expected = position_m[before] + share[:, None] * (position_m[after] - position_m[before])
    error[here] = np.linalg.norm(position_m[here] - expected, axis=1)
    return error


def _repeats(sample: IntArray, channel: pa.ChunkedArray) -> Any:
    """Rows that repeat the (sample, channel) of the row before; frames are sorted by both."""
    codes = pc.dictionary_encode(channel.combine_chunks()).indices.to_numpy()
    repeated = np.zeros(len(sample), dtype=bool)
    repeated[1:] = (sample[1:] == sample[:-1]) & (codes[1:] == codes[:-1])
    return repeated


def measure_samples(context: Context, frames: pa.Table) -> pa.Table:
    """One row a sample: interval to the sample before (ms and relative to the data set's median), camera spread, jitter and wait, cameras and
    lidar present, chain and pose problems."""
    samples = context.index.samples
    sample, count = frame_sample(context), context.index.samples.num_rows
    is_camera = frames["phase_ms"].is_valid().to_numpy()
    phase = frames["phase_ms"].fill_null(0.0).to_numpy()
    jitter = frames["jitter_ms"].fill_null(0.0).to_numpy()
    owner = sample[is_camera]
    high, low, worst = np.full(count, -np.inf), np.full(count, np.inf), np.full(count, -np.inf)
    np.maximum.at(high, owner, phase[is_camera])
    np.minimum.at(low, owner, phase[is_camera])
    np.maximum.at(worst, owner, jitter[is_camera])
    interval_ms = _intervals_ms(context)
    usual_ms = np.nanmedian(interval_ms) if np.isfinite(interval_ms).any() else np.nan
    lidar = np.bincount(sample[pc.equal(frames["channel"], LIDAR).to_numpy()], minlength=count)
    return pa.table(
        {
            "token": samples["token"],
            "scene_name": samples["scene_name"],
            "interval_ms": _null_nan(interval_ms),
            "relative_interval": _null_nan(interval_ms / usual_ms),
            "camera_spread_ms": _null_nan(high - low),
            "camera_wait_ms": _null_nan(np.maximum(np.abs(high), np.abs(low))),
            "camera_jitter_ms": _null_nan(worst),
            "missing_camera": _missing_cameras(context, sample),
            "lidar_frames": lidar,
            "label_age_ms": _null_nan(_label_age_ms(context, sample)),
            "chain_problem": _sample_chain(context),
            "pose_problem": problems(count, [("no ego pose", ~np.isfinite(matrices(samples["ego2global"], 4)).all(axis=(1, 2)))]),
        }
    )


def _label_age_ms(context: Context, sample: IntArray) -> FloatArray:
    """Time between each sample, which its labels belong to, and the nearest of its key frames; NaN without any.

    Annotated labels are those of a sensor frame. A sample between the frames holds labels that were interpolated.
    """
    stamps, labelled = context.index.frames["timestamp_us"].to_numpy(), context.index.samples["timestamp_us"].to_numpy()
    nearest = np.full(len(labelled), np.inf)
    np.minimum.at(nearest, sample, 1e-3 * np.abs(stamps - labelled[sample]))
    return np.where(np.isfinite(nearest), nearest, np.nan)


def _intervals_ms(context: Context) -> FloatArray:
    """Time since the sample before in the same scene, NaN for the first."""
    stamps, scene = context.index.samples["timestamp_us"].to_numpy(), scene_of_sample(context)
    interval = np.full(len(stamps), np.nan)
    same = scene[1:] == scene[:-1]
    interval[1:][same] = MS_PER_US * (stamps[1:] - stamps[:-1])[same]
    return interval


def _missing_cameras(context: Context, sample: IntArray) -> pa.Array:
    """First of the six cameras that a sample has no key frame of, "" if none."""
    channels = context.index.frames["channel"]
    count = context.index.samples.num_rows
    present = {name: np.bincount(sample[pc.equal(channels, name).to_numpy()], minlength=count) > 0 for name in CAMERAS}
    return problems(count, [(f"no key frame of {name}", ~mask) for name, mask in present.items()])


def _sample_chain(context: Context) -> pa.Array:
    samples = context.index.samples
    return chain_problems(samples, scene_of_sample(context), samples["timestamp_us"].to_numpy())


def measure_scenes(context: Context) -> pa.Table:
    """One row a scene: samples found against nbr_samples, and problems of its first and last sample."""
    scene, samples = context.tables.scene, context.index.samples
    owner = positions(samples["scene_token"], scene)
    count = np.bincount(owner, minlength=scene.num_rows)
    first, last = np.full(scene.num_rows, -1), np.full(scene.num_rows, -1)
    last[owner] = np.arange(len(owner))
    first[owner[::-1]] = np.arange(len(owner))[::-1]
    ends = {
        "first": positions(scene["first_sample_token"], samples) != first,
        "last": positions(scene["last_sample_token"], samples) != last,
    }
    return pa.table(
        {
            "token": scene["token"],
            "scene_name": scene["name"],
            "sample_difference": count - scene["nbr_samples"].to_numpy(),
            "end_problem": problems(
                scene.num_rows,
                [
                    ("no samples", count == 0),
                    ("first_sample_token is not the first sample in time", ends["first"]),
                    ("last_sample_token is not the last sample in time", ends["last"]),
                ],
            ),
        }
    )


def measure_sample_data(context: Context) -> pa.Table:
    """One row a sample_data record (sweeps too): problem of its chain."""
    data = context.tables.sample_data
    sample = positions(data["sample_token"], context.tables.sample)
    scene = positions(context.tables.sample["scene_token"], context.tables.scene)[sample]
    channel = positions(data["calibrated_sensor_token"], context.tables.calibrated_sensor)
    owner = scene * context.tables.calibrated_sensor.num_rows + channel
    links = read_frame_links(context.tables.folder)
    return pa.table({"token": data["token"], "chain_problem": chain_problems(links, owner, timestamps_us(data["timestamp"]))})


def statistics(context: Context, frames: pa.Table, samples: pa.Table) -> dict[str, Any]:
    """Phase and jitter of each camera in ms, sample intervals, and how many samples each policy keeps."""
    cameras = {}
    for name in CAMERAS:
        rows = frames.filter(pc.equal(frames["channel"], name))
        if rows.num_rows:
            phase, jitter = rows["phase_ms"].to_numpy(), rows["jitter_ms"].to_numpy()
            cameras[name] = {
                "phase_median_ms": _rounded(np.median(phase)),
                "jitter_median_ms": _rounded(np.median(jitter)),
                "jitter_p99_ms": _rounded(np.percentile(jitter, 99)),
                "jitter_max_ms": _rounded(jitter.max()),
            }
    motion, error = (frames.filter(frames["phase_ms"].is_valid())[name].drop_null().to_numpy() for name in ("motion_m", "pose_error_m"))
    return {
        "cameras": cameras,
        "camera_spread_ms": _quantiles(samples["camera_spread_ms"].drop_null().to_numpy()),
        "interval_ms": _quantiles(samples["interval_ms"].drop_null().to_numpy()),
        "ego_motion_to_reference_m": _quantiles(motion),
        "residual_motion_error_m": _quantiles(error),
        "policies": {policy: int(np.sum(kept)) for policy, kept in policies(context, samples).items()},
    }


def policies(context: Context, samples: pa.Table) -> Mapping[str, Any]:
    """Which samples each policy keeps, as masks: phase (jitter), window (wait for the farthest camera), strict (spread of the cameras)."""
    config = context.config
    limits = {
        "phase": ("camera_jitter_ms", config.max_jitter_ms),
        "window": ("camera_wait_ms", config.max_wait_ms),
        "strict": ("camera_spread_ms", config.max_spread_ms),
    }
    return {name: samples[column].fill_null(0.0).to_numpy() <= limit for name, (column, limit) in limits.items()}


def _quantiles(values: FloatArray) -> dict[str, float]:
    if not len(values):
        return {}
    return {name: _rounded(np.percentile(values, q)) for name, q in (("min", 0), ("median", 50), ("p99", 99), ("max", 100))}


def _rounded(value: Any) -> float:
    # Five digits after the point are 10 ns or 10 micro-metres: below what the tables hold, above rounding noise between processors.
    return round(float(value), 5) + 0.0
