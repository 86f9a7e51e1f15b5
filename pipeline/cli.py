"""`bevj6 <verb>`: the pipeline's verbs for people and scripts.

Every verb takes `--json`: then stdout holds one JSON document and nothing else; messages go to stderr. Exit status: 0 done, 1 the answer is no or
something is wrong with the input, 2 wrong usage. Domain code is imported inside the verbs, so `bevj6 --help` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import BevError, DataError
from pipeline.io import print_answer

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.paths import Paths


@dataclass(frozen=True)
class Answer:
    """What a verb has to say: as a JSON value, as text for people, and the exit status."""

    document: Any
    text: str
    status: int = 0


# Verbs of `python -m pipeline.j6`, which stands alone (onnx and numpy only) and reads its own arguments.
HARDWARE_MODEL_VERBS = {
    "compile": "Compile an ONNX model for a chip: execution plan and memory map.",
    "profile": "Simulated latency, bandwidth and memory of an ONNX model or a plan.",
    "j6": "All of the hardware model: profile, compile, fit, validate, chips.",
}
Verb = Callable[[argparse.Namespace], Answer]


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in HARDWARE_MODEL_VERBS:
        from pipeline.j6.__main__ import main as hardware_model

        return hardware_model(arguments[1:] if arguments[0] == "j6" else arguments)
    options = _parser().parse_args(arguments)
    try:
        # Libraries print to stdout at will; there it would spoil the JSON document.
        with contextlib.redirect_stdout(sys.stderr):
            answer = options.verb_function(options)
    except BevError as error:
        print(f"bevj6 {options.verb}: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        from pipeline.stages.main import STORAGE_FULL

        if error.errno not in STORAGE_FULL:
            raise
        print(f"bevj6 {options.verb}: error: cannot write {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    print_answer(json.dumps(answer.document, indent=2, sort_keys=True) if options.json else answer.text)
    return int(answer.status)


# ------------------------------------------------------------------------------------------------------------ the project
def preset(options: argparse.Namespace) -> Answer:
    """Write a preset over params.yaml."""
    from pipeline.preset import write_preset

    changes = write_preset(_paths(options).params, options.name)
    lines = [f"{field}: {old} -> {new}" for field, (old, new) in changes.items()]
    return Answer({"preset": options.name, "changes": changes}, "\n".join(lines) or f"params.yaml is the preset {options.name!r} already")


def summary(options: argparse.Namespace) -> Answer:
    """Where to look after a run."""
    from pipeline.io import read_json

    paths = _paths(options)
    gate, profile = read_json(paths.report("gate.json")), read_json(paths.report("profile.json"))
    float_report, int8_report = read_json(paths.report("eval_float.json")), read_json(paths.report("eval_int8.json"))
    document = {
        "gate_passed": gate["passed"], "chip": profile["chip"], "latency_ms": profile["latency_ms"], "float": _headline(float_report),
        "int8": _headline(int8_report), "report": str(paths.report("release.html")), "profile": str(paths.report("profile.html")),
    }  # fmt: skip
    lines = [f"{name:16s} float {value:.4f}   INT8 {document['int8'].get(name, float('nan')):.4f}" for name, value in document["float"].items()]
    lines.append(f"{'latency':16s} {profile['latency_ms']:.2f} ms simulated on {profile['chip']}")
    lines.append(f"{'gate':16s} {'passed' if gate['passed'] else 'FAILED'}; the page to open: {document['report']}")
    return Answer(document, "\n".join(lines))


def run_stage(options: argparse.Namespace) -> Answer:
    """Bring one stage, and what it depends on, up to date (`dvc repro <stage>`)."""
    # `python` in dvc.yaml is the interpreter of this command, whether its environment is activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", options.verb]
    failed = subprocess.run(command, cwd=options.project, env=os.environ | {"PATH": path}, stdout=sys.stderr).returncode != 0
    return Answer({"stage": options.verb, "up_to_date": not failed}, f"{options.verb}: {'failed' if failed else 'up to date'}", int(failed))


def gate(options: argparse.Namespace) -> Answer:
    """Verdict of the last run's gate; status 1 unless it passed."""
    from pipeline.io import read_json

    path = _paths(options).report("gate.json")
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("passed"), bool):
        raise DataError(f"{path}: field passed must be true or false")
    rules = document.get("rules", [])
    marks = {"failed": {"error": "FAILED", "warning": "warning"}}
    lines = [f"{marks.get(rule['verdict'], {}).get(rule['severity'], rule['verdict']):9s} {rule['name']}: {rule['reason']}" for rule in rules]
    lines += [f"{item['verdict']:9s} {item['item']}: {item['reason']}" for item in document.get("checklist", [])]
    return Answer(document, "\n".join([*lines, f"gate: {'passed' if document['passed'] else 'FAILED'}"]), int(not document["passed"]))


def compare(options: argparse.Namespace) -> Answer:
    """Two versions side by side."""
    from pipeline.tracking.compare import as_text, compare_versions

    comparison = compare_versions(options.project, options.a, options.b)
    return Answer(comparison.as_dict(), as_text(comparison))


def data_diff(options: argparse.Namespace) -> Answer:
    """What changed in the data between two versions; status 1 if anything did."""
    from pipeline.tracking.data_diff import as_text, diff_data

    diff = diff_data(options.project, options.a, options.b)
    return Answer(diff.as_dict(), as_text(diff), int(not diff.same))


def doctor(options: argparse.Namespace) -> Answer:
    """What is reachable; status 1 if something that is configured is not."""
    from pipeline.tracking.doctor import examine

    checks = examine(options.project)
    lines = [f"{ {True: 'ok', False: 'FAULT', None: '-'}[check.ok]:6s} {check.name}: {check.detail}" for check in checks]
    healthy = all(check.ok is not False for check in checks)
    return Answer({"healthy": healthy, "checks": [check.as_dict() for check in checks]}, "\n".join(lines), int(not healthy))


# ------------------------------------------------------------------------------------------------------- your own data, model
def validate(options: argparse.Namespace) -> Answer:
    """Judge a nuScenes-format data set; status 1 unless it passes. Writes nothing."""
    from pipeline.validation.command import print_summary, validate_dataset

    paths = _paths(options)
    config = _config(paths) if paths.params.is_file() else _defaults()
    report = validate_dataset(options.dataroot, options.version, config.validation, config.execution.workers)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print_summary(report)
    return Answer(report, text.getvalue().rstrip(), int(not report["passed"]))


def vectorize(options: argparse.Namespace) -> Answer:
    """Mask images to one GeoJSON or map expansion file."""
    from pipeline.maps.vectorize.command import vectorize_files

    done = vectorize_files(options.masks, options.resolution, options.out, classes=options.classes, origin_m=tuple(options.origin))
    return Answer(asdict(done), str(done))


def quantize(options: argparse.Namespace) -> Answer:
    """A float ONNX model to INT8."""
    from pipeline.quantization.command import quantize_model, read_quantization
    from pipeline.quantization.reports import applied_plan, explain

    config = read_quantization(options.config) if options.config else None
    done = quantize_model(options.model, options.calib, options.chip, options.out, config)
    rows = applied_plan(done.model, done.plan)
    lines = [explain(rows, tensor) for tensor in options.explain]
    document = {
        "out": str(options.out), "tensors": done.counts(), "promoted": dict(done.promotion.reasons), "output_noise": dict(done.noise),
        "explained": lines,
    }  # fmt: skip
    return Answer(document, "\n".join([*lines, f"{options.out}: {done}"]))


def explain_tensor(options: argparse.Namespace) -> Answer:
    """How the project's INT8 model stores a tensor, and which rule decided."""
    from pipeline.quantization.reports import explain, read_plan

    text = explain(read_plan(options.plan or _paths(options).report("quant_plan.csv")), options.tensor)
    return Answer({"tensor": options.tensor, "explained": text.splitlines()}, text)


# ------------------------------------------------------------------------------------------------------------ the registry
def register(options: argparse.Namespace) -> Answer:
    """Log the working tree's version in MLflow and register its INT8 model; set it aside where MLflow is away."""
    from pipeline.errors import ServiceError
    from pipeline.tracking.outbox import park
    from pipeline.tracking.registration import register_release

    paths = _paths(options)
    try:
        done = register_release(paths, _config(paths))
    except ServiceError as error:
        raise ServiceError(f"{error}\nThe version is kept in {park(paths, _config(paths))}; the next `bevj6 register` sends it") from error
    lines = [f"{done.name} version {number}: registered, it had waited for the server" for number in done.sent]
    lines.append(f"{done.name} version {done.version}: {'registered' if done.created else 'already registered'}, gate {done.gate}")
    return Answer(done.as_dict(), "\n".join([*lines, done.run_url]))


def promote(options: argparse.Namespace) -> Answer:
    """Make a version champion."""
    from pipeline.tracking import registry

    paths = _paths(options)
    change = registry.promote(paths, _config(paths, options.chip), options.version, options.force)
    return Answer(change.as_dict(), f"{change.model}: champion is version {change.version}, {change.before}")


def rollback(options: argparse.Namespace) -> Answer:
    """Make the previous champion champion again."""
    from pipeline.tracking import registry

    paths = _paths(options)
    change = registry.rollback(paths, _config(paths, options.chip), options.reason)
    return Answer(change.as_dict(), f"{change.model}: champion is version {change.version} again, {change.before}")


def history(options: argparse.Namespace) -> Answer:
    """Who changed the champion when, and why."""
    from pipeline.tracking.registry import release_history

    paths = _paths(options)
    changes = release_history(paths, _config(paths, options.chip))
    lines = [
        f"{change.at}  {change.action}: version {change.version}, {change.before}; by {change.by}, gate {change.gate}"
        + (f", reason: {change.reason}" if change.reason else "") + "".join(f"\n    overruled: {line}" for line in change.overruled)
        + ("" if change.done or not change.number else "\n    NOT DONE: cut short; the next promote or rollback completes or forgets it")
        for change in changes
    ]  # fmt: skip
    return Answer([change.as_dict() for change in changes], "\n".join(lines) or "no version has been promoted yet")


def reproduce(options: argparse.Namespace) -> Answer:
    """Make a registered version again in a fresh folder and repeat its evaluation; status 1 unless the numbers are the same."""
    from pipeline.tracking.reproduce import reproduce as reproduce_version

    paths = _paths(options)
    version = int(options.version) if options.version.isdigit() else options.version.removeprefix("@")
    done = reproduce_version(paths, _config(paths, options.chip), version, options.folder)
    lines = [f"{row.metric}: logged {row.logged}, now {row.reproduced}" for row in done.differences]
    verdict = "the same" if done.same else f"{len(done.differences)} differ"
    text = f"{done.model} version {done.version} from commit {done.git_commit[:10]} in {done.folder}: {done.compared} numbers compared, {verdict}"
    return Answer(done.as_dict(), "\n".join([*lines, text]), int(not done.same))


# ------------------------------------------------------------------------------------------------------------------ helpers
def _paths(options: argparse.Namespace) -> Paths:
    from pipeline.paths import Paths

    return Paths(options.project)


def _config(paths: Paths, chip: str | None = None) -> Config:
    from pipeline.config import load_config

    return load_config(paths.params, {"j6": {"chip": chip}} if chip else None)


def _defaults() -> Config:
    from pipeline.config import Config

    return Config()


def _headline(report: dict[str, dict[str, float]]) -> dict[str, float]:
    """The one number of each head that was evaluated."""
    names = {"detection": "mAP", "map": "AP", "occupancy": "mIoU"}
    return {f"{head} {metric}": report[head][metric] for head, metric in names.items() if head in report}


# ------------------------------------------------------------------------------------------------------------- command line
def _parser() -> argparse.ArgumentParser:
    text = "From nuScenes-format data to a gated INT8 BEV model with a simulated Journey 6 latency."
    parser = argparse.ArgumentParser(prog="bevj6", description=text)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_project_verbs(verbs)
    _add_model_verbs(verbs)
    _add_registry_verbs(verbs)
    return parser


def _add(verbs: Any, name: str, function: Verb, help_text: str | None = None) -> argparse.ArgumentParser:
    """A verb with the options that all verbs have."""
    text = help_text or (function.__doc__ or "").strip()
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("--json", action="store_true", help="one JSON document on stdout")
    verb.add_argument("--project", type=Path, default=Path(), metavar="DIR", help="directory of dvc.yaml and params.yaml (default: the current one)")
    verb.set_defaults(verb_function=function)
    return verb


def _add_project_verbs(verbs: Any) -> None:
    _add(verbs, "preset", preset).add_argument("name", help="mini or v1_j6m")
    _add(verbs, "summary", summary)
    _add(verbs, "train", run_stage, "Train the model (`dvc repro train`).")
    _add(verbs, "report", run_stage, "Make the release report (`dvc repro report`).")
    _add(verbs, "gate", gate)
    verb = _add(verbs, "compare", compare, "Two versions side by side: data, parameters, metrics, simulated latency by head, layer errors.")
    verb.add_argument("a", metavar="A", help="a directory with reports/, a git revision of the project, or a registered version: 3, @champion")
    verb.add_argument("b", metavar="B", help="the other one")
    data = verbs.add_parser("data", help="What changed in the data.").add_subparsers(dest="data_verb", required=True, metavar="VERB")
    verb = _add(data, "diff", data_diff, "Scenes, frames, labels and maps that differ between two versions.")
    verb.add_argument("a", metavar="REV1", help="a git revision of the project, or . for the working tree")
    verb.add_argument("b", metavar="REV2", help="the other one")
    _add(verbs, "doctor", doctor, "What is set up and reachable.")


def _add_model_verbs(verbs: Any) -> None:
    verb = _add(verbs, "validate", validate)
    verb.add_argument("dataroot", type=Path, metavar="DATAROOT", help="directory that holds the tables' directory and the sensor files")
    verb.add_argument("--version", required=True, help="name of the tables' directory, for example v1.0-mini")
    verb = _add(verbs, "vectorize", vectorize)
    verb.add_argument("masks", type=Path, nargs="+", metavar="MASK", help="image: bright is on, or values 1, 2, 3 for divider, crossing, area")
    verb.add_argument("--resolution", type=float, required=True, metavar="M", help="size of a pixel, m")
    verb.add_argument("--out", type=Path, required=True, help=".geojson, or .json for a nuScenes map expansion")
    verb.add_argument("--classes", nargs="+", help="class of each mask (default: from the file name, else from its shape)")
    verb.add_argument("--origin", type=float, nargs=2, default=(0.0, 0.0), metavar=("X", "Y"), help="map coordinates of the lower left corner, m")
    verb = _add(verbs, "quantize", quantize)
    verb.add_argument("model", type=Path, help="float32 ONNX model with static shapes")
    verb.add_argument("--calib", type=Path, required=True, metavar="DIR", help="folder of .npy or .npz batches, normalised as in training")
    verb.add_argument("--chip", default="j6m", help="chip profile (default: j6m)")
    verb.add_argument("--out", type=Path, required=True, help="INT8 model to write")
    verb.add_argument("--config", type=Path, metavar="YAML", help="quantization parameters, as in params.yaml (default: the defaults)")
    verb.add_argument("--explain", action="append", default=[], metavar="TENSOR", help="say which rule decided about a tensor; repeatable")
    verb = _add(verbs, "explain", explain_tensor)
    verb.add_argument("tensor", metavar="TENSOR", help="activation, weight or bias of models/multitask.onnx")
    verb.add_argument("--plan", type=Path, metavar="CSV", help="plan to read (default: reports/quant_plan.csv)")
    for name, text in HARDWARE_MODEL_VERBS.items():
        verbs.add_parser(name, help=text)  # for the list in --help; `main` hands them over before this parser reads


def _add_registry_verbs(verbs: Any) -> None:
    _add(verbs, "register", register)
    text = "Make a registered version champion: gate passed, not worse than the champion, nothing stored with it changed."
    verb = _add(verbs, "promote", promote, text)
    verb.add_argument("version", type=int, nargs="?", help="model version (default: the candidate)")
    verb.add_argument("--force", metavar="REASON", help="overrule gate and champion; the reason is recorded")
    verb.add_argument("--chip", help="chip whose model is meant (default: params.yaml)")
    verb = _add(verbs, "rollback", rollback)
    verb.add_argument("--reason", help="recorded")
    verb.add_argument("--chip", help="chip whose model is meant (default: params.yaml)")
    _add(verbs, "history", history).add_argument("--chip", help="chip whose model is meant (default: params.yaml)")
    verb = _add(verbs, "reproduce", reproduce)
    verb.add_argument("version", help="model version, or an alias: 3, champion")
    verb.add_argument("folder", type=Path, help="where to; must not exist or be empty")
    verb.add_argument("--chip", help="chip whose model is meant (default: params.yaml)")


if __name__ == "__main__":
    sys.exit(main())
