"""The columnar index at the size of v1.0-trainval against nuscenes-devkit, in one run.

    python benchmarks/index_scale.py [--scale 1.0] [--folder DIR]

Writes tables with the row counts of v1.0-trainval times `--scale` (850 scenes, 34 thousand samples, 1.17 million annotations, 2.63 million sensor
frames and poses; about 3 GB at scale 1) and measures, each in a process of its own: `NuScenes(...)` of the devkit, building and writing the
index, and opening it again up to the first sample. Prints wall-clock and CPU seconds, peak memory and the ratios; the devkit needs about 10 GB
of memory at scale 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np

SCENES, SAMPLES_PER_SCENE, FRAMES_PER_SAMPLE, BOXES_PER_SAMPLE = 850, 40, 77, 34
CHANNELS = (
    *(f"CAM_{name}" for name in ("FRONT", "FRONT_RIGHT", "BACK_RIGHT", "BACK", "BACK_LEFT", "FRONT_LEFT")), "LIDAR_TOP",
    *(f"RADAR_{name}" for name in ("FRONT", "FRONT_LEFT", "FRONT_RIGHT", "BACK_LEFT", "BACK_RIGHT")),
)  # fmt: skip
VERSION = "v1.0-trainval"

DEVKIT = """
from nuscenes import NuScenes
work = lambda: NuScenes("v1.0-trainval", "{root}", verbose=False)
"""
BUILD = """
from pathlib import Path
from pipeline.dataset.build import build_index
from pipeline.dataset.index import write_index
from pipeline.dataset.tables import read_tables
def work():
    tables = read_tables(Path("{root}"), "v1.0-trainval")
    write_index(build_index(tables, {{}}), Path("{root}/data/index"), "{root}", "v1.0-trainval", "benchmark")
"""
OPEN = """
from pathlib import Path
from pipeline.dataset.index import Index
def work():
    index = Index.open(Path("{root}/data/index"))
    assert index.sample(index.tokens()[len(index) // 2]).cameras
"""
# The peak is the process' own high-water mark: ru_maxrss starts from that of the process which started it.
MEASURE = """
import json, time
start, cpu_start = time.perf_counter(), time.process_time()
result = work()
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
with open("/proc/self/status") as status:
    peak_mb = int(status.read().split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_mb}))
"""


def token(kind: str, number: int) -> str:
    """A 32-digit token that compresses as badly as a real one."""
    return f"{(number * 0x9E3779B97F4A7C15 + sum(kind.encode()) * 0xC2B2AE3D27D4EB4F) % (1 << 128):032x}"


def write_table(folder: Path, name: str, records: Iterable[dict]) -> None:
    """One table in nuScenes' own layout: an array with one value a line."""
    encoder = json.JSONEncoder(separators=(",\n", ": "))
    with (folder / f"{name}.json").open("w") as stream:
        for number, record in enumerate(records):
            # As with `indent=0`, which would not use the encoder in C.
            text = encoder.encode(record)[1:-1].replace("[", "[\n").replace("]", "\n]").replace("[\n\n]", "[]")
            stream.write(("[\n{\n" if number == 0 else ",\n{\n") + text + "\n}")
        stream.write("\n]")


def small_tables(folder: Path, scenes: int) -> None:
    """All tables without sensor frames and annotations."""
    write_table(folder, "category", [{"token": "c0", "name": "vehicle.car", "description": ""}])
    write_table(folder, "attribute", [{"token": "a0", "name": "vehicle.moving", "description": ""}])
    write_table(folder, "visibility", [{"token": str(i), "level": f"v{i}", "description": ""} for i in range(1, 5)])
    sensors = [{"token": name, "channel": name, "modality": name.split("_")[0].replace("CAM", "camera").lower()} for name in CHANNELS]
    write_table(folder, "sensor", sensors)
    logs = [
        {"token": token("log", i), "logfile": f"n008-{i}", "vehicle": "n008", "date_captured": "", "location": "boston-seaport"} for i in range(68)
    ]
    write_table(folder, "log", logs)
    (folder.parent / "maps").mkdir()
    cv2.imwrite(str(folder.parent / "maps" / "m.png"), np.zeros((8, 8), np.uint8))
    write_table(folder, "map", [{"token": "m0", "category": "", "filename": "maps/m.png", "log_tokens": [log["token"] for log in logs]}])
    write_table(folder, "calibrated_sensor", calibrations(scenes))
    write_table(
        folder,
        "scene",
        (
            {
                "token": token("scene", i), "log_token": logs[i % len(logs)]["token"], "nbr_samples": SAMPLES_PER_SCENE, "name": f"scene-{i:04d}",
                "first_sample_token": token("sample", i * SAMPLES_PER_SCENE), "last_sample_token": token("sample", (i + 1) * SAMPLES_PER_SCENE - 1),
                "description": "Parked truck, intersection",
            }
            for i in range(scenes)
        ),
    )  # fmt: skip


def calibrations(scenes: int) -> Iterator[dict]:
    """Twelve calibrated sensors a scene."""
    matrix = [[1266.4, 0.0, 816.3], [0.0, 1266.4, 491.5], [0.0, 0.0, 1.0]]
    for i in range(scenes * len(CHANNELS)):
        channel = CHANNELS[i % len(CHANNELS)]
        pose = {"translation": [1.7, 0.0159, 1.51], "rotation": [0.4998, -0.503, 0.4998, -0.4974]}
        yield {"token": token("cal", i), "sensor_token": channel, **pose, "camera_intrinsic": matrix if channel.startswith("CAM") else []}


def samples(scenes: int) -> Iterator[dict]:
    """Samples of all scenes, 0.5 s apart."""
    for i in range(scenes * SAMPLES_PER_SCENE):
        neighbours = chain("sample", i, i % SAMPLES_PER_SCENE == 0, i % SAMPLES_PER_SCENE == SAMPLES_PER_SCENE - 1)
        yield {"token": token("sample", i), "timestamp": time_us(i), **neighbours, "scene_token": token("scene", i // SAMPLES_PER_SCENE)}


def chain(kind: str, number: int, first: bool, last: bool) -> dict[str, str]:
    """prev and next of a record whose neighbours have the numbers before and after."""
    return {"prev": "" if first else token(kind, number - 1), "next": "" if last else token(kind, number + 1)}


def time_us(sample: int) -> int:
    """Time stamp of a sample."""
    return 1_532_402_927_647_951 + 500_000 * sample


def frame_fields(number: int) -> tuple[int, int, int]:
    """Sample, place in the sample and time stamp of sensor frame `number`; the first twelve of a sample are its key frames."""
    sample, place = divmod(number, FRAMES_PER_SAMPLE)
    return sample, place, time_us(sample) + 6_000 * place


def sample_data(scenes: int) -> Iterator[dict]:
    """Key frames and sweeps."""
    for i in range(scenes * SAMPLES_PER_SCENE * FRAMES_PER_SAMPLE):
        sample, place, stamp = frame_fields(i)
        sensor = place % len(CHANNELS)
        folder = "samples" if place < len(CHANNELS) else "sweeps"
        yield {
            "token": token("data", i), "sample_token": token("sample", sample), "ego_pose_token": token("data", i),
            "calibrated_sensor_token": token("cal", sample // SAMPLES_PER_SCENE * len(CHANNELS) + sensor), "timestamp": stamp, "fileformat": "jpg",
            "is_key_frame": place < len(CHANNELS), "height": 900, "width": 1600, **chain("data", i, i == 0, False),
            "filename": f"{folder}/{CHANNELS[sensor]}/n015-2018-07-24-11-22-45+0800__{CHANNELS[sensor]}__{stamp}.jpg",
        }  # fmt: skip


def ego_poses(scenes: int) -> Iterator[dict]:
    """One pose a sensor frame."""
    for i in range(scenes * SAMPLES_PER_SCENE * FRAMES_PER_SAMPLE):
        stamp = frame_fields(i)[2]
        rotation = [0.5720139793595926, -0.0018477237033291815, 0.0117641593359254, -0.820157422626558]
        yield {"token": token("data", i), "timestamp": stamp, "rotation": rotation, "translation": [411.3378729169 + 1e-6 * i, 1180.8903, 0.0]}


def annotations(scenes: int) -> Iterator[dict]:
    """Boxes; the j-th box of successive samples of a scene is one instance."""
    for i in range(scenes * SAMPLES_PER_SCENE * BOXES_PER_SAMPLE):
        scene, rest = divmod(i, SAMPLES_PER_SCENE * BOXES_PER_SAMPLE)
        track, step = divmod(rest, SAMPLES_PER_SCENE)
        yield {
            "token": token("box", i), "sample_token": token("sample", scene * SAMPLES_PER_SCENE + step),
            "instance_token": token("instance", scene * BOXES_PER_SAMPLE + track), "visibility_token": "4", "attribute_tokens": ["a0"],
            "translation": [637.141 + step, 1636.252, -0.235], "size": [0.621, 0.647, 1.778],
            "rotation": [0.3495370229501106, 0.0, 0.0, 0.9369225526088983],
            **chain("box", i, step == 0, step == SAMPLES_PER_SCENE - 1), "num_lidar_pts": 5, "num_radar_pts": 0,
        }  # fmt: skip


def instances(scenes: int) -> Iterator[dict]:
    """One instance a track."""
    for i in range(scenes * BOXES_PER_SAMPLE):
        first = i * SAMPLES_PER_SCENE
        ends = {"first_annotation_token": token("box", first), "last_annotation_token": token("box", first + SAMPLES_PER_SCENE - 1)}
        yield {"token": token("instance", i), "category_token": "c0", "nbr_annotations": SAMPLES_PER_SCENE, **ends}


def write_tables(root: Path, scale: float) -> None:
    """A data set without sensor files."""
    scenes = max(1, round(SCENES * scale))
    folder = root / VERSION
    folder.mkdir(parents=True)
    small_tables(folder, scenes)
    large: dict[str, Callable[[int], Iterator[dict]]] = {
        "sample": samples, "sample_data": sample_data, "ego_pose": ego_poses, "sample_annotation": annotations, "instance": instances,
    }  # fmt: skip
    for name, make in large.items():
        write_table(folder, name, make(scenes))


def measure(code: str, root: Path) -> dict[str, float]:
    """Seconds and peak memory of `work()` in a fresh process; imports are not timed."""
    run = subprocess.run([sys.executable, "-c", code.format(root=root) + MEASURE], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Index against nuscenes-devkit at trainval size.")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of v1.0-trainval (default 1)")
    parser.add_argument("--folder", type=Path, help="keep the tables here (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary) / "set"
        if not (root / VERSION / "instance.json").is_file():
            write_tables(root, options.scale)
        results = {name: measure(code, root) for name, code in (("devkit", DEVKIT), ("build", BUILD), ("open", OPEN))}
    for name, result in results.items():
        print(f"{name:8s} {result['seconds']:8.2f} s  {result['cpu_seconds']:8.2f} CPU s  {result['peak_mb']:8.0f} MB")
    for name in ("build", "open"):
        ratios = {key: results["devkit"][key] / results[name][key] for key in results[name]}
        line = f"{ratios['seconds']:.1f}x as fast, 1/{ratios['cpu_seconds']:.1f} of the CPU time, 1/{ratios['peak_mb']:.1f} of the peak memory"
        print(f"{name} against the devkit: {line}")


if __name__ == "__main__":
    main()
