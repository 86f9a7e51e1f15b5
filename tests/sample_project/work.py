"""Stages of the sample project: real files of the real formats, made in a fraction of a second.

`python work.py <stage>`; a file `fail-<stage>` in the project makes the stage end like one with bad input, `stop-<stage>` makes it wait to be killed,
`hold-<stage>` makes it wait until the file is gone. Each start of a stage adds a line to `starts`.
"""

import csv
import json
import sys
import time
from pathlib import Path

import yaml


def dataset(params):
    seed = params["dataset"]["synthetic"]["seed"]
    write("data/dataset.json", {
        "source": "synthetic", "dataroot": "data/nuscenes", "version": "v1.0-synthetic", "counts": {"sample": 2},
        "fingerprint": f"{seed:064x}", "splits": {"train": ["scene-0001"], "val": ["scene-0002"]},
        "provides": {"lidar": True, "map_expansion": [], "occupancy": 2},
    })  # fmt: skip


def train(params):
    steps = params["train"]["steps"]
    write("models/float/metrics.json", {"loss": 1.0 / steps})
    with Path("models/float/curves.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["step", "loss", "detection_loss"])
        rows.writerows([step, 1.0 / (1 + step), ""] for step in range(steps))
    write("models/contract.json", {"inputs": {"images": [6, 3, 8, 8], "ego2img": [6, 4, 4]}})
    Path("models/multitask.onnx").write_bytes(network(seed=steps))


def network(seed):
    """A two-input network with a convolution, as bytes."""
    import numpy as np
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(seed)
    weights = [
        numpy_helper.from_array(rng.normal(size=(4, 3, 3, 3)).astype(np.float32), "kernel"),
        numpy_helper.from_array(rng.normal(size=(4, 4)).astype(np.float32), "mix"),
    ]
    nodes = [
        helper.make_node("Conv", ["images", "kernel"], ["features"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["features"], ["active"]),
        helper.make_node("GlobalAveragePool", ["active"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["camera_features"]),
        helper.make_node("MatMul", ["camera_features", "mix"], ["scores"]),
        helper.make_node("ReduceMean", ["ego2img"], ["pose_mean"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "sample",
        [value(name, shape) for name, shape in (("images", [6, 3, 8, 8]), ("ego2img", [6, 4, 4]))],
        [value(name, shape) for name, shape in (("scores", [6, 4]), ("pose_mean", [6, 4]))], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def value(name, shape):
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def evaluate(params):
    from PIL import Image

    write("reports/eval_float.json", {"detection": {"mAP": 0.4, "NDS": 0.5}, "map": {"AP": 0.5}, "occupancy": {"mIoU": 0.3}})
    Image.new("RGB", (1600, 40), "green").save("reports/predictions_float.png")


def quantize(params):
    import numpy as np
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self):
            rng = np.random.default_rng(0)
            shapes = {"images": (6, 3, 8, 8), "ego2img": (6, 4, 4)}
            self.batches = iter([{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(2)])

        def get_next(self):
            return next(self.batches, None)

    quantize_static("models/multitask.onnx", "models/multitask_int8.onnx", Images(), per_channel=True)
    write("reports/eval_int8.json", {"detection": {"mAP": 0.395, "NDS": 0.498}, "map": {"AP": 0.496}, "occupancy": {"mIoU": 0.299}})


def profile(params):
    heads = {"shared": 4.5, "detection": 2.0, "map": 1.25, "occupancy": 1.0}
    write("reports/profile.json", {
        "chip": params["j6"]["chip"], "latency_ms": sum(heads.values()), "fps": 1000.0 / sum(heads.values()),
        "ddr_bytes_per_frame": 12345678, "by_head_ms": heads, "profile_hash": "c" * 64,
    })  # fmt: skip


def gate(params):
    latency = json.loads(Path("reports/profile.json").read_text())["latency_ms"]
    passed = latency <= 33.0
    rule = {
        "name": "latency", "value": latency, "limit": 33.0, "passed": passed, "severity": "error",
        "verdict": "passed" if passed else "failed", "reason": f"{latency} against 33.0",
    }  # fmt: skip
    item = {"item": "warm restart", "verdict": "undecided", "rules": [], "reason": "needs the board"}
    write("reports/gate.json", {"passed": passed, "rules": [rule], "checklist": [item]})
    Path("reports/release.html").write_text("<!doctype html><title>Release</title><p>Sample</p>\n")


def write(path, content):
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    stage = sys.argv[1]
    if Path(f"fail-{stage}").exists():
        sys.exit(f"{stage}: error: data/broken.json: not valid JSON")
    with Path("starts").open("a") as starts:
        starts.write(f"{stage}\n")
    if Path(f"hold-{stage}").exists():
        Path(f"hold-{stage}.running").touch()
        while Path(f"hold-{stage}").exists():
            time.sleep(0.05)
    if Path(f"stop-{stage}").exists():
        Path(f"stop-{stage}.running").touch()
        time.sleep(60)
    globals()[stage](yaml.safe_load(Path("params.yaml").read_text()))
