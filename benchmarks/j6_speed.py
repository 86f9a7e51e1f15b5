"""Speed of the hardware model: `profile` from the shell on the largest graphs, growth with the number of nodes, and cost queries a minute.

    python benchmarks/j6_speed.py --zoo DIR [--model FILE ...] [--rival-python PYTHON]

Prints CPU seconds (user + system, children included), because wall time depends on what else runs. `--rival-python` is an interpreter that has
onnx-tool installed: its profile of the same files runs in turn with ours and the ratio is printed. `--model` adds files, for example the reference
size of the pipeline's model; the cost queries use the last of them.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.j6.chip import load_chip
from pipeline.j6.compiler import CompileOptions, compile_graph
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_model
from pipeline.j6.profile import profile
from pipeline.j6.search import DtypeSearch

REPEATS = 3
QUERIES = 2000


def chain(length: int) -> onnx.ModelProto:
    """`length` 3x3 convolutions in a row with a shared weight."""
    weight = numpy_helper.from_array(np.zeros((16, 16, 3, 3), np.float32), "w")
    nodes = [helper.make_node("Conv", [f"t{i}", "w"], [f"t{i + 1}"], name=f"c{i}", pads=[1] * 4) for i in range(length)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16, 32, 32]) for name in ("t0", f"t{length}")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def cpu_seconds_of(command: list[str]) -> float | None:
    """CPU time of a command, user and system; None when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(f"  {' '.join(command[1:3])} failed: {done.stderr.strip().splitlines()[-1]}")
        return None
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_on(path: Path, rival: str | None) -> str:
    """One line: our CPU seconds on a file and, with a rival, its own and the ratio; the two take turns."""
    ours, theirs = [], []
    for _ in range(REPEATS):
        ours.append(cpu_seconds_of([sys.executable, "-m", "pipeline.j6", "profile", str(path), "--json"]))
        if rival and None not in theirs:
            theirs.append(cpu_seconds_of([rival, "-m", "onnx_tool", "-i", str(path)]))
    best = min(seconds for seconds in ours if seconds is not None)
    line = f"{path.name}: {best:.2f} s from the shell"
    return line if not theirs or None in theirs else line + f"; onnx-tool {min(theirs):.2f} s, ratio {min(theirs) / best:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--rival-python")
    options = parser.parse_args()
    largest = sorted(options.zoo.glob("*.onnx"), key=lambda p: -p.stat().st_size)[:3]
    for path in (*largest, *options.model):
        print(compare_on(path, options.rival_python), flush=True)
    chip = load_chip("j6m")
    for length in (1000, 2000, 5000, 10000):
        model = chain(length)
        start = time.process_time()
        profile(compile_graph(fuse(import_model(model, Path("chain"), "hash")), chip, CompileOptions()))
        seconds = time.process_time() - start
        print(f"{length} nodes: {seconds:.2f} s, {1e6 * seconds / length:.0f} us a node", flush=True)
    search = DtypeSearch([*largest, *options.model][-1], chip)
    names = search.tensors
    start = time.process_time()
    for number in range(QUERIES):
        search.extra_ms({names[number % len(names)]: "int16"})
    seconds = time.process_time() - start
    print(f"{60 * QUERIES / seconds:.0f} cost queries a minute on {len(names)} tensors")


if __name__ == "__main__":
    main()
