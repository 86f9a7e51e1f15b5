"""Calibration and quantization against onnxruntime.quantization: same float model, same batches, one run.

    python benchmarks/calibration.py [--model MODEL.onnx --batches CALIBRATION_FOLDER] [--count 50]

Without --model a ResNet-18-like network with random weights is exported. Every tool runs in its own process, which reads the same files,
writes a QDQ model and reports its wall time, processor time and peak memory. Ratios are of processor time, against onnxruntime's MinMax (wall
time depends on what else runs). SQNR is that of the outputs, over
batches that were not used for calibration, all models run by the same unfused onnxruntime session. onnxruntime's Entropy is left out: with
its default number of bins there is one candidate threshold, so it returns MinMax's file. Tools quantize different numbers of tensors,
printed beside the SQNR.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx

THREADS = 2
HELD_OUT = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="float ONNX model (default: a ResNet-18-like network)")
    parser.add_argument("--batches", type=Path, help="folder of .npz batches for --model")
    parser.add_argument("--count", type=int, default=50, help="calibration batches (default: 50)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model, batches = (options.model, options.batches) if options.model else make_example(work, options.count + HELD_OUT)
        rows = {name: measure(tool, model, batches, options.count, work / f"{index}.onnx") for index, (name, tool) in enumerate(TOOLS.items())}
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows)
    return 0


def batch_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def read_batches(files: list[Path]) -> Iterator[dict[str, np.ndarray]]:
    for file in files:
        with np.load(file, allow_pickle=False) as archive:
            yield {name: archive[name] for name in archive.files}


# --- the tools ------------------------------------------------------------------------------------------------------------------------


def float_passes(model: Path, files: list[Path], out: Path) -> None:
    """The floor: run the float model once a batch, write nothing new."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    for batch in read_batches(files):
        session.run(None, batch)
    out.write_bytes(model.read_bytes())


def _run_ours(observer: str, model: Path, files: list[Path], out: Path) -> None:
    from pipeline.config import QuantizationConfig
    from pipeline.quantization.calibrate import calibrate
    from pipeline.quantization.model import load_float_model
    from pipeline.quantization.plan import make_plan
    from pipeline.quantization.qdq import write_qdq

    config = QuantizationConfig.model_validate({"calibration_batches": len(files), "analysis_batches": 1, "observer": observer, "threads": THREADS})
    network = load_float_model(model)
    calibration = calibrate(network, read_batches(files), config)
    out.write_bytes(write_qdq(network, make_plan(network, config, calibration.statistics)).SerializeToString())


def ours_minmax(model: Path, files: list[Path], out: Path) -> None:
    _run_ours("minmax", model, files, out)


def ours_percentile(model: Path, files: list[Path], out: Path) -> None:
    _run_ours("percentile", model, files, out)


def ours_mse(model: Path, files: list[Path], out: Path) -> None:
    _run_ours("mse", model, files, out)


def ours_kl(model: Path, files: list[Path], out: Path) -> None:
    _run_ours("kl", model, files, out)


def _run_onnxruntime(method_name: str, model: Path, files: list[Path], out: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = read_batches(files)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._batches, None)

    options = {"ActivationSymmetric": True, "WeightSymmetric": True}
    quantize_static(
        str(model), str(out), Reader(), quant_format=QuantFormat.QDQ, per_channel=True, activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod[method_name], extra_options=options,
    )  # fmt: skip


def onnxruntime_minmax(model: Path, files: list[Path], out: Path) -> None:
    _run_onnxruntime("MinMax", model, files, out)


def onnxruntime_percentile(model: Path, files: list[Path], out: Path) -> None:
    _run_onnxruntime("Percentile", model, files, out)


TOOLS: dict[str, Callable[[Path, list[Path], Path], None]] = {
    "float passes": float_passes,
    "onnxruntime MinMax": onnxruntime_minmax,
    "onnxruntime Percentile": onnxruntime_percentile,
    "ours minmax": ours_minmax,
    "ours percentile": ours_percentile,
    "ours mse": ours_mse,
    "ours kl": ours_kl,
}


# --- measuring ------------------------------------------------------------------------------------------------------------------------


def measure(tool: Callable[[Path, list[Path], Path], None], model: Path, batches: Path, count: int, out: Path) -> dict[str, float]:
    files = batch_files(batches)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(tool, model, files[:count], out, sender))
    process.start()
    seconds, cpu_seconds, peak = receiver.recv()
    process.join()
    quantizers = sum(node.op_type == "QuantizeLinear" for node in onnx.load(str(out)).graph.node)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mb": peak / 1e6,
        "quantizers": quantizers,
        "sqnr_db": output_sqnr_db(model, out, files[count : count + HELD_OUT] or files[:HELD_OUT]),
    }


def _child(tool: Callable[[Path, list[Path], Path], None], model: Path, files: list[Path], out: Path, sender: object) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    tool(model, files, out)
    sender.send((time.perf_counter() - start, time.process_time() - cpu, peak_bytes()))  # type: ignore[attr-defined]


def peak_bytes() -> int:
    """Peak resident memory of this process. getrusage would start from the parent's, which a spawned process inherits."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def output_sqnr_db(model: Path, quantized: Path, files: list[Path]) -> float:
    from pipeline.quantization.sessions import Runner, output_noise

    names = [value.name for value in onnx.load(str(model)).graph.output]
    exact, rounded = (Runner(onnx.load(str(path)), names, THREADS) for path in (model, quantized))
    pairs = [(exact.run(batch), rounded.run(batch)) for batch in read_batches(files)]
    noise = output_noise(
        [np.concatenate([a[name].ravel() for a, _ in pairs]) for name in names],
        [np.concatenate([b[name].ravel() for _, b in pairs]) for name in names],
    )
    return 200.0 if noise == 0.0 else float(-10 * np.log10(noise))


def print_table(rows: dict[str, dict[str, float]]) -> None:
    base = rows["onnxruntime MinMax"]
    print(f"{'tool':24} {'seconds':>8} {'cpu s':>7} {'x MinMax':>9} {'peak MB':>8} {'quantizers':>10} {'SQNR dB':>8}")
    for name, row in rows.items():
        ratio = row["cpu_seconds"] / base["cpu_seconds"]  # processor time: wall time depends on what else runs
        print(
            f"{name:24} {row['seconds']:8.1f} {row['cpu_seconds']:7.1f} {ratio:9.2f} {row['peak_mb']:8.0f} "
            f"{row['quantizers']:10.0f} {row['sqnr_db']:8.1f}"
        )


# --- the example model ----------------------------------------------------------------------------------------------------------------


def make_example(folder: Path, count: int) -> tuple[Path, Path]:
    """A ResNet-18-like network (He initialisation, batch norm folded by the exporter) and smooth random images of 3x224x224."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
            self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.b(functional.relu(self.a(x))) * 0.5 + self.skip(x))

    torch.manual_seed(0)
    stages = [Block(64, 64, 1), Block(64, 64, 1), Block(64, 128, 2), Block(128, 128, 1), Block(128, 256, 2), Block(256, 256, 1), Block(256, 512, 2)]
    network = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        Block(512, 512, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 100),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    path = folder / "float.onnx"
    torch.onnx.export(
        network.eval(), (torch.zeros(1, 3, 224, 224),), str(path), input_names=["images"], output_names=["logits"], opset_version=20, dynamo=False
    )
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        parts = [functional.interpolate(torch.randn(1, 3, 224 // s, 224 // s, generator=generator), (224, 224), mode="bilinear") for s in (1, 8, 32)]
        np.savez(folder / f"{index:03}.npz", images=(sum(parts) * 0.6).numpy())
    return path, folder


if __name__ == "__main__":
    raise SystemExit(main())
