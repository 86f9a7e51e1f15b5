"""Speed of the hardware model: `profile` from the shell on the largest graphs, and growth with the number of nodes.

    python benchmarks/j6_speed.py --zoo DIR

Prints wall seconds of `python -m pipeline.j6 profile` and the time of import to profile for chains of 1,000 to 10,000 convolutions. If onnx-tool is
installed, its profile of the same files runs beside ours and the ratio is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.j6.chip import load_chip
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_model
from pipeline.j6.plan import CompileOptions, compile_graph
from pipeline.j6.profile import profile


def chain(length: int) -> onnx.ModelProto:
    """`length` 3x3 convolutions in a row with a shared weight."""
    weight = numpy_helper.from_array(np.zeros((16, 16, 3, 3), np.float32), "w")
    nodes = [helper.make_node("Conv", [f"t{i}", "w"], [f"t{i + 1}"], name=f"c{i}", pads=[1] * 4) for i in range(length)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16, 32, 32]) for name in ("t0", f"t{length}")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    options = parser.parse_args()
    rival = importlib.util.find_spec("onnx_tool") is not None
    for path in sorted(options.zoo.glob("*.onnx"), key=lambda p: -p.stat().st_size)[:3]:
        ours = min(seconds_of([sys.executable, "-m", "pipeline.j6", "profile", str(path), "--json"]) for _ in range(3))
        line = f"{path.name}: {ours:.2f} s from the shell"
        if rival:
            theirs = min(seconds_of([sys.executable, "-m", "onnx_tool", "-i", str(path)]) for _ in range(3))
            line += f"; onnx-tool {theirs:.2f} s, ratio {theirs / ours:.2f}"
        print(line)
    chip = load_chip("j6m")
    for length in (1000, 2000, 5000, 10000):
        model = chain(length)
        start = time.perf_counter()
        profile(compile_graph(fuse(import_model(model, Path("chain"), "hash")), chip, CompileOptions()))
        seconds = time.perf_counter() - start
        print(f"{length} nodes: {seconds:.2f} s, {1e6 * seconds / length:.0f} us a node")


if __name__ == "__main__":
    main()
