"""Calibration against onnxruntime.quantization, torchao's PT2E and a plain KL calibration: one float model, the same batches, the same points.

    python benchmarks/calibration.py [--model MODEL.onnx --batches CALIBRATION_FOLDER] [--count 50] [--project DIR]

Every tool observes exactly the tensors that our plan needs (`observed_tensors`) and gives a threshold for each; all thresholds go through our
QDQ writer, so that the models differ in them alone. int16 and fixed ranges are the same in all models. Each tool runs in a process of its own with
one thread, from files to thresholds; processor time and the peak of its resident memory are reported. After that, on batches that no tool saw:

    outputs dB   SQNR of the model's outputs, mean of the noise over outputs
    points dB    SQNR of each calibrated int8 tensor rounded with its threshold, mean over tensors
    kept %       with --project (a directory after `dvc repro`): share of the float task metrics on the held-out scenes

onnxruntime's Percentile as shipped keeps all tensors of all batches; here it gets one batch a call, which gives the same histograms in less memory.
onnxruntime's Entropy is no baseline: with its default number of bins there is one candidate threshold, and it returns MinMax's file. PT2E is skipped
where torchao is not installed. Without --model a ResNet-18-like network with random weights is exported: good for times, not for accuracy.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from pipeline.config import QuantizationConfig
from pipeline.quantization.calibrate import calibrate
from pipeline.quantization.convention import STEPS, covering_threshold
from pipeline.quantization.model import FloatModel, load_float_model
from pipeline.quantization.plan import QuantPlan, make_plan, observed_tensors
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.sessions import Batch, Runner, output_noise

HELD_OUT = 8
MEMORY_LIMIT_BYTES = 9 << 30  # a tool that wants more has failed, and not the machine
KL_BINS, KL_LEVELS = 2048, 128

Thresholds = dict[str, float]
Tool = Callable[[Path, Sequence[Path]], Thresholds]


@dataclass(frozen=True)
class Row:
    """What one tool cost, and its thresholds; `problem` says why there are none."""

    cpu_s: float = 0.0
    peak_mb: float = 0.0
    thresholds: Thresholds | None = None
    problem: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="float ONNX model (default: a ResNet-18-like network)")
    parser.add_argument("--batches", type=Path, help="folder of .npz batches for --model")
    parser.add_argument("--count", type=int, default=50, help="calibration batches (default: 50)")
    parser.add_argument("--project", type=Path, help="directory of the project whose task metrics judge the models")
    parser.add_argument("--limit", type=int, default=1500, metavar="S", help="processor seconds that a tool may take (default: 1500)")
    parser.add_argument("--only", nargs="+", choices=list(TOOLS), default=list(TOOLS), metavar="TOOL", help="tools to run (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, batches = (options.model, options.batches) if options.model else make_example(Path(folder), options.count + HELD_OUT)
        normal = Path(folder) / "normal.onnx"  # the form that our loader works on: all tools see the same names and operators
        onnx.save(load_float_model(model).proto, str(normal))
        files = sorted(batches.glob("*.npz"))
        judge = Judge(normal, files[: options.count], files[options.count : options.count + HELD_OUT], options.project)
        print(f"{len(judge.points)} points, {len(judge.calibrated)} of them int8 ranges by calibration, {options.count} batches")
        print(f"{'tool':24} {'cpu s':>7} {'peak MB':>8} {'outputs dB':>10} {'points dB':>9}  kept %", flush=True)
        for name in options.only:
            print_row(name, measure(TOOLS[name], normal, files[: options.count], options.limit), judge)
    return 0


def print_row(name: str, row: Row, judge: Judge) -> None:
    text = f"{name:24} {row.cpu_s:7.1f} {row.peak_mb:8.0f}"
    if row.thresholds is None:
        print(f"{name:24} {row.problem}", flush=True)
    elif not row.thresholds:
        print(text, flush=True)
    else:
        outputs_db, points_db, kept = judge(row.thresholds)
        print(f"{text} {outputs_db:10.2f} {points_db:9.2f}  {kept}", flush=True)


def read_batches(files: Sequence[Path]) -> Iterator[dict[str, NDArray]]:
    for file in files:
        with np.load(file, allow_pickle=False) as archive:
            yield {name: archive[name] for name in archive.files}


# ------------------------------------------------------------------------------------------------------------------------- ours
def _ours(observer: str, model: Path, files: Sequence[Path]) -> Thresholds:
    network = load_float_model(model)
    config = _config(len(files), observer)
    return _calibrated(make_plan(network, config, calibrate(network, read_batches(files), config).statistics))


def _config(batches: int, observer: str = "mse") -> QuantizationConfig:
    return QuantizationConfig.model_validate({"calibration_batches": batches, "analysis_batches": 1, "observer": observer, "threads": 1})


def _calibrated(plan: QuantPlan) -> Thresholds:
    """Thresholds of int8 tensors that calibration decided."""
    return {name: float(each.threshold or 0.0) for name, each in plan.roots().items() if each.dtype == "int8" and "range by" in each.rule}


def ours_minmax(model: Path, files: Sequence[Path]) -> Thresholds:
    return _ours("minmax", model, files)


def ours_percentile(model: Path, files: Sequence[Path]) -> Thresholds:
    return _ours("percentile", model, files)


def ours_mse(model: Path, files: Sequence[Path]) -> Thresholds:
    return _ours("mse", model, files)


def ours_kl(model: Path, files: Sequence[Path]) -> Thresholds:
    return _ours("kl", model, files)


# ------------------------------------------------------------------------------------------------------------------------ peers
def float_passes(model: Path, files: Sequence[Path]) -> Thresholds:
    """The floor: the float model once a batch, nothing observed."""
    session = _session(str(model), optimised=True)
    for batch in read_batches(files):
        session.run(None, batch)
    return {}


def _session(model: str | bytes, optimised: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class _Reader:
    """Batches as onnxruntime's calibrators ask for them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._batches = read_batches(files)

    def get_next(self) -> dict[str, NDArray] | None:
        return next(self._batches, None)


def _onnxruntime(method: str, model: Path, calls: Sequence[Sequence[Path]]) -> Thresholds:
    """A calibrator of onnxruntime that observes our points; each of `calls` is handed to it at once."""
    from onnxruntime.quantization import calibrate as peer

    points = observed_tensors(load_float_model(model))
    base = {"MinMax": peer.MinMaxCalibrater, "Percentile": peer.PercentileCalibrater}[method]

    class Calibrator(base):  # type: ignore[misc, valid-type]
        def select_tensors_to_calibrate(self, model: onnx.ModelProto) -> tuple[set[str], dict[str, onnx.ValueInfoProto]]:
            return set(points), super().select_tensors_to_calibrate(model)[1]

        def create_inference_session(self) -> None:
            self.infer_session = _session(self.augmented_model_path, optimised=False)

    with tempfile.TemporaryDirectory() as folder:
        calibrator = Calibrator(model, augmented_model_path=str(Path(folder) / "augmented.onnx"), symmetric=True)
        calibrator.augment_graph()
        calibrator.create_inference_session()
        for files in calls:
            calibrator.collect_data(_Reader(files))
    ranges = calibrator.compute_data().data
    ends = {name: [float(np.squeeze(end)) for end in ranges[name].range_value[:2]] for name in points}
    return {name: covering_threshold(low, high, "int8") for name, (low, high) in ends.items()}


def onnxruntime_minmax(model: Path, files: Sequence[Path]) -> Thresholds:
    return _onnxruntime("MinMax", model, [files])


def onnxruntime_percentile(model: Path, files: Sequence[Path]) -> Thresholds:
    return _onnxruntime("Percentile", model, [[file] for file in files])


def plain_kl(model: Path, files: Sequence[Path]) -> Thresholds:
    """Two passes (range, then histogram of 2,048 bins) with all points as outputs; threshold as in Migacz, GTC 2017."""
    network = load_float_model(model)
    runner = Runner(network.proto, observed_tensors(network), 1)
    largest = dict.fromkeys(runner.tensors, 0.0)
    for batch in read_batches(files):
        for name, value in runner.run(batch).items():
            largest[name] = max(largest[name], float(np.abs(value).max()))
    counts = {name: np.zeros(KL_BINS) for name in runner.tensors}
    for batch in read_batches(files):
        for name, value in runner.run(batch).items():
            counts[name] += np.histogram(np.abs(value), KL_BINS, (0.0, largest[name] or 1.0))[0]
    return {name: _least_divergence(counts[name]) / KL_BINS * largest[name] for name in runner.tensors}


def _least_divergence(counts: NDArray[np.float64]) -> int:
    """Number of bins to keep, so that their distribution in 128 levels is nearest to the clipped one."""
    best, least = KL_BINS, np.inf
    for stop in range(KL_LEVELS, KL_BINS + 1):
        reference = counts[:stop].copy()
        reference[-1] += counts[stop:].sum()
        level = np.arange(stop) * KL_LEVELS // stop
        filled = counts[:stop] > 0
        share = np.bincount(level, counts[:stop], KL_LEVELS) / np.maximum(np.bincount(level, filled, KL_LEVELS), 1)
        model = np.where(filled, share[level], 0.0)
        p, q = reference / max(reference.sum(), 1.0), model / max(model.sum(), 1.0)
        used = p > 0
        divergence = float(np.sum(p[used] * np.log(p[used] / np.maximum(q[used], 1e-9))))
        if divergence < least:
            best, least = stop, divergence
    return best


def pt2e(model: Path, files: Sequence[Path]) -> Thresholds:
    """torchao: the model as torch operations, exported, with PT2E's HistogramObserver behind each point."""
    import torch
    from torchao.quantization.pt2e import HistogramObserver
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    torch.set_num_threads(1)
    network = load_float_model(model)
    first = next(read_batches(files[:1]))
    graph, names = _exported(network, first)
    prepared = prepare_pt2e(graph, _point_quantizer(set(names.values())))
    with torch.no_grad():
        for batch in read_batches(files):
            prepared(*(torch.from_numpy(batch[name]) for name in network.inputs))
    found = {}
    for node in prepared.graph.nodes:
        observer = getattr(prepared, node.target) if node.op == "call_module" else None
        if isinstance(observer, HistogramObserver):
            found[node.args[0].name] = float(observer.calculate_qparams()[0]) * STEPS["int8"]
    return {name: found[node] for name, node in names.items()}


def _exported(network: FloatModel, first: Batch) -> Any:
    """(graph that returns the model's outputs, point -> name of the graph's node that makes it)."""
    import torch

    from pipeline.quantization.torch_graph import TorchGraph

    points, graph = set(observed_tensors(network)), TorchGraph(network)
    order: list[str] = []

    def constant(node: onnx.NodeProto, position: int) -> torch.Tensor | NDArray:
        """Shapes and axes as numbers: an export cannot read them from tensors."""
        value = network.constants[node.input[position]]
        return value if value.dtype == np.int64 and node.op_type != "Gather" else graph.constant(node, position)

    class Module(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, seen = dict(zip(network.inputs, inputs, strict=True)), {}

            def remember(name: str, value: torch.Tensor) -> torch.Tensor:
                value = given.get(name, value)
                if name in points:
                    seen[name] = value
                return value

            outputs = graph.run(first, constant, remember)  # type: ignore[arg-type]
            order[:] = seen
            return (*seen.values(), *outputs.values())

    exported = torch.export.export(Module(), tuple(torch.from_numpy(first[name]) for name in network.inputs), strict=False).module()
    output = exported.graph.output_node()
    made: Any = output.args[0]
    output.args = (tuple(made[len(order) :]),)  # points are no outputs any more: memory is freed as in the float model
    exported.graph.set_codegen(torch.fx.graph.CodeGen())
    exported.recompile()
    return exported, {name: node.name for name, node in zip(order, made, strict=False)}


def _point_quantizer(nodes: set[str]) -> Any:
    import torch
    from torchao.quantization.pt2e import HistogramObserver
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

    spec = QuantizationSpec(torch.int8, HistogramObserver, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_symmetric)

    class PointQuantizer(Quantizer):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            for node in model.graph.nodes:
                if node.name in nodes:
                    node.meta["quantization_annotation"] = QuantizationAnnotation(output_qspec=spec, _annotated=True)
            return model

        def validate(self, model: torch.fx.GraphModule) -> None:
            """Every annotation is one that PT2E knows."""

    return PointQuantizer()


TOOLS: dict[str, Tool] = {
    "float passes": float_passes,
    "onnxruntime MinMax": onnxruntime_minmax,
    "onnxruntime Percentile": onnxruntime_percentile,
    "torchao PT2E": pt2e,
    "plain KL": plain_kl,
    "ours minmax": ours_minmax,
    "ours percentile": ours_percentile,
    "ours kl": ours_kl,
    "ours mse": ours_mse,
}


# ------------------------------------------------------------------------------------------------------------------- measuring
def measure(tool: Tool, model: Path, files: Sequence[Path], limit_s: int) -> Row:
    if tool is pt2e and importlib.util.find_spec("torchao") is None:
        return Row(problem="skipped: torchao is not installed (pip install --no-deps torchao)")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(tool, model, files, limit_s, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return Row(problem=f"not finished within {limit_s} processor seconds")
    finally:
        process.join()


def _child(tool: Tool, model: Path, files: Sequence[Path], limit_s: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    start = time.process_time()
    try:
        thresholds = tool(model, files)
    except Exception as error:  # a tool that fails is a row of the table, whatever it fails of
        sender.send(Row(problem=f"failed: {type(error).__name__}: {str(error)[:200]}"))
        return
    sender.send(Row(time.process_time() - start, peak_bytes() / 1e6, thresholds))


def peak_bytes() -> int:
    """Peak resident memory of this process. getrusage would start from the parent's, which a spawned process inherits."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


class Judge:
    """Makes a model from thresholds and measures it on batches that no tool saw."""

    def __init__(self, model: Path, files: Sequence[Path], held_out: Sequence[Path], project: Path | None) -> None:
        self._network, self._project = load_float_model(model), project
        config = _config(len(files))
        self._plan = make_plan(self._network, config, calibrate(self._network, read_batches(files), config).statistics)
        self.points, self.calibrated = observed_tensors(self._network), tuple(_calibrated(self._plan))
        self._held_out = list(read_batches(held_out))
        self._float = Runner(self._network.proto, [*dict.fromkeys((*self._network.float_outputs, *self.calibrated))], 1)

    def __call__(self, thresholds: Thresholds) -> tuple[float, float, str]:
        """(SQNR of the outputs in dB, mean SQNR of the points in dB, shares of the task metrics in per cent)."""
        used = {name: thresholds[name] for name in self.calibrated if thresholds[name] > 0.0}
        tensors = {name: replace(each, threshold=used.get(each.root, each.threshold)) for name, each in self._plan.tensors.items()}
        proto = write_qdq(self._network, replace(self._plan, tensors=tensors))
        names = self._network.float_outputs
        rounded = Runner(proto, names, 1)
        exact_outputs, outputs = [], []
        powers = {name: np.zeros(2) for name in used}  # signal, noise
        for batch in self._held_out:
            exact = self._float.peek(batch)
            for name, threshold in used.items():
                powers[name] += _powers(exact[name], threshold / STEPS["int8"])
            exact_outputs.append([exact[name].copy() for name in names])
            outputs.append(list(rounded.run(batch).values()))
        noise = output_noise([np.stack(each) for each in zip(*exact_outputs, strict=True)], [np.stack(each) for each in zip(*outputs, strict=True)])
        points = [10.0 * np.log10(signal / noise) for signal, noise in powers.values() if signal > 0.0 and noise > 0.0]
        return -10.0 * float(np.log10(noise)), float(np.mean(points)), self._kept(proto)

    def _kept(self, proto: onnx.ModelProto) -> str:
        if self._project is None:
            return "-"
        from pipeline.config import load_config
        from pipeline.paths import Paths
        from pipeline.quantization.acceptance import share_kept

        paths = Paths(self._project)
        shares = share_kept(proto, load_config(paths.params), paths)
        return ", ".join(f"{head} {100 * share:.1f}" for head, share in shares.items() if share is not None)


def _powers(value: NDArray[np.float32], step: float) -> NDArray[np.float64]:
    """Signal and noise of a tensor rounded to int8."""
    rounded = np.clip(np.rint(value / np.float32(step)), -128, 127) * np.float32(step)
    return np.array([np.vdot(value, value), np.square(value - rounded).sum()], np.float64)


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
        np.savez(folder / f"{index:03}.npz", images=(torch.stack(parts).sum(0) * 0.6).numpy())
    return path, folder


if __name__ == "__main__":
    raise SystemExit(main())
