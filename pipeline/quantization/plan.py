"""Which data type and range every activation gets, and which rule said so.

The unit of decision is a storage group: a tensor together with everything that only looks at it (reshape, transpose, slice, ...), because the
chip moves those bytes without touching them. Rules in order of precedence, the first that speaks wins, data type and range each on their own:

1. `rules` of the configuration (name patterns),
2. paths into GridSample grids (the chip's toolchain does the same),
3. promotion of the most sensitive tensors to int16,
4. paths into graph outputs,
5. `op_dtypes` and `fixed_thresholds` by operator type,
6. `default_dtype` and `observer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from pipeline.config import QuantizationConfig, QuantRule
from pipeline.errors import ConfigError, ModelError
from pipeline.quantization.convention import SMALLEST_SCALE, STEPS, scale_of
from pipeline.quantization.fusion import VIEW_OPS, fused_tensors
from pipeline.quantization.model import FloatModel
from pipeline.quantization.observers import AUTO, TensorStatistics, automatic_threshold, threshold_of

MATRIX_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
OUTPUT_PATH_ENDS = MATRIX_OPS | {"GridSample", "Softmax", "LayerNormalization", "Resize", "AveragePool", "GlobalAveragePool"}
GRID_THRESHOLD = 2.0
"""Grid coordinates are normalised: beyond -1..1 lies outside the image, and beyond -2..2 bilinear sampling sees only the padding."""

LARGEST_FLOAT = float(np.finfo(np.float32).max)
MOST_SATURATED = 0.5
"""A fixed range that more than this share of the non-zero values leave is a mistake, not a clamp."""


@dataclass(frozen=True)
class TensorPlan:
    """Decision about one activation. `threshold` is None exactly for float32; `root` is the tensor whose storage it shares."""

    tensor: str
    dtype: str
    threshold: float | None
    root: str
    rule: str
    power_of_two: bool = False

    @property
    def scale(self) -> float:
        """Real value of one integer step."""
        if self.threshold is None:
            raise ModelError(f"tensor {self.tensor!r} is not quantized ({self.rule})")
        return scale_of(self.threshold, self.dtype, self.power_of_two)


@dataclass(frozen=True)
class StoredWeight:
    """Integers chosen for a weight instead of the nearest ones, and the scales that they belong to."""

    scales: NDArray[np.float32]
    integers: NDArray[np.integer]


@dataclass(frozen=True)
class QuantPlan:
    """Decisions for all float activations of a model, in graph order, and what repair changed.

    `weights`: constant -> chosen integers. `bias_shifts`: name of a matrix node -> what its bias is raised by, one number an output channel.
    """

    tensors: dict[str, TensorPlan]
    weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    bias_shifts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def quantized(self) -> dict[str, TensorPlan]:
        """Only the tensors that get a quantizer."""
        return {name: plan for name, plan in self.tensors.items() if plan.threshold is not None}

    def roots(self) -> dict[str, TensorPlan]:
        """One quantized tensor for each storage group."""
        return {name: plan for name, plan in self.quantized().items() if plan.root == name}

    def explain(self, tensor: str) -> str:
        """One line: what was decided about `tensor` and why."""
        plan = self.tensors.get(tensor)
        if plan is None:
            raise ModelError(f"tensor {tensor!r}: not a float activation of this model{hint(tensor, self.tensors)}")
        if plan.threshold is None:
            return f"{tensor}: float32; {plan.rule}"
        return f"{tensor}: {plan.dtype}, threshold {plan.threshold:.6g}, scale {plan.scale:.6g}; {plan.rule}"


def hint(name: str, known: Iterable[str]) -> str:
    """Text that proposes the known name nearest to an unknown one; empty when none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def observed_tensors(model: FloatModel) -> tuple[str, ...]:
    """Tensors whose statistics a plan can need: the storage roots that are not fused away."""
    fused = fused_tensors(model)
    roots = storage_roots(model)
    return tuple(name for name in model.activations if roots[name] == name and name not in fused)


def make_plan(
    model: FloatModel, config: QuantizationConfig, statistics: Mapping[str, TensorStatistics], promoted: Mapping[str, str] | None = None
) -> QuantPlan:
    """Decide data type and range of every activation.

    Args:
        statistics: calibration result by tensor name; every observed tensor must be there.
        promoted: root tensor -> reason, int8 tensors that sensitivity analysis turns into int16.

    Raises:
        ConfigError: a rule matches nothing, or two rules disagree about a tensor.
        ModelError: calibration lacks a tensor or saw NaN or infinite values.
    """
    check_op_types(config)
    planner = _Planner(model, config, statistics, promoted or {})
    decisions = {root: planner.decide(root, members) for root, members in planner.groups.items()}
    tensors = {}
    for name in model.activations:
        if name in planner.fused:
            tensors[name] = TensorPlan(name, "float32", None, name, f"never stored: computed inside the operator that makes {planner.fused[name]!r}")
        else:
            root = planner.roots[name]
            dtype, threshold, rule = decisions[root]
            text = rule if root == name else f"shares the storage of {root!r}: {rule}"
            tensors[name] = TensorPlan(name, dtype, threshold, root, text, config.power_of_two_scales)
    return QuantPlan(tensors)


def check_op_types(config: QuantizationConfig) -> None:
    """Raise `ConfigError` for a key of `op_dtypes` or `fixed_thresholds` that no ONNX operator has for a name: it would match nothing, ever."""
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    for option in ("op_dtypes", "fixed_thresholds"):
        for name in getattr(config, option):
            if name not in known:
                raise ConfigError(f"quantization.{option}: {name!r} is no ONNX operator type{hint(name, known)}")


def storage_roots(model: FloatModel) -> dict[str, str]:
    """Activation -> tensor whose bytes it shows (itself, unless a view operator makes it)."""
    roots = {name: name for name in model.activations}
    for node in model.nodes:
        if node.op_type in VIEW_OPS and node.input[0] in roots:
            roots.update({name: roots[node.input[0]] for name in node.output if name in roots})
    return roots


def is_named(model: FloatModel, pattern: str, tensor: str) -> bool:
    """True when `pattern` (shell wildcards, case matters) fits the tensor, the node that makes it or that node's module path."""
    node = model.producer.get(tensor)
    names = (tensor, node.name if node is not None else tensor, model.module_of(tensor))
    return any(fnmatchcase(name, pattern) for name in names if name)


class _Planner:
    """Look-ups shared by the decisions of one plan."""

    def __init__(
        self, model: FloatModel, config: QuantizationConfig, statistics: Mapping[str, TensorStatistics], promoted: Mapping[str, str]
    ) -> None:
        self.model, self.config, self.statistics, self.promoted = model, config, statistics, promoted
        self.roots = storage_roots(model)
        self.fused = fused_tensors(model)
        self.groups = self._groups()
        self.grid_path = _upstream(model, _grid_operands(model), _ends_grid_path)
        self.output_path = _upstream(model, model.outputs, lambda model, node: node.op_type in OUTPUT_PATH_ENDS)
        self.rules = self._match_rules()

    def _groups(self) -> dict[str, list[str]]:
        """Storage root -> its views and the tensors fused into it; a fused tensor itself gets no decision."""
        groups: dict[str, list[str]] = {name: [] for name in self.model.activations if self.roots[name] == name and name not in self.fused}
        for name in self.model.activations:
            owner = self.roots[self.fused.get(name, name)]
            if owner in groups:
                groups[owner].append(name)
        return groups

    def _match_rules(self) -> dict[str, list[QuantRule]]:
        """Root -> rules that speak about it. A pattern that matches nothing is an error."""
        matched: dict[str, list[QuantRule]] = {}
        for rule in self.config.rules:
            hits = [root for root, members in self.groups.items() if any(is_named(self.model, rule.pattern, name) for name in members)]
            if not hits:
                raise ConfigError(f"quantization.rules: pattern {rule.pattern!r} matches no node, tensor or module of {self.model.path}")
            for root in hits:
                matched.setdefault(root, []).append(rule)
        return matched

    def decide(self, root: str, members: list[str]) -> tuple[str, float | None, str]:
        """(data type, threshold, rule) of a storage group."""
        dtype, dtype_rule = self._dtype(root, members)
        if dtype == "float32":
            return dtype, None, dtype_rule
        threshold, threshold_rule = self._threshold(root, members, dtype)
        return dtype, threshold, f"{dtype_rule}; {threshold_rule}"

    def _dtype(self, root: str, members: list[str]) -> tuple[str, str]:
        explicit = self._agreed(root, "dtype")
        op_type = self.model.op_type_of(root)
        if explicit is not None:
            return explicit
        if self.grid_path.intersection(members):
            return self.config.grid_dtype, f"{self.config.grid_dtype} on the path into a GridSample grid"
        if root in self.promoted:
            return "int16", f"int16 promoted: {self.promoted[root]}"
        if self.output_path.intersection(members):
            return self.config.output_dtype, f"{self.config.output_dtype} on the path into a graph output"
        if op_type in self.config.op_dtypes:
            return self.config.op_dtypes[op_type], f"{self.config.op_dtypes[op_type]} for operator type {op_type}"
        return self.config.default_dtype, f"{self.config.default_dtype} by default"

    def _threshold(self, root: str, members: list[str], dtype: str) -> tuple[float, str]:
        explicit = self._agreed(root, "threshold")
        op_type = self.model.op_type_of(root)
        if explicit is not None:
            return self._possible(float(explicit[0]), dtype, root, f"quantization.rules: {explicit[1]}"), explicit[1]
        if self._feeds_only_grids(members):
            return GRID_THRESHOLD, f"range {GRID_THRESHOLD:g} fixed for a sampling grid"
        if op_type in self.config.fixed_thresholds:
            threshold = self._possible(self.config.fixed_thresholds[op_type], dtype, root, f"quantization.fixed_thresholds: {op_type}")
            return threshold, f"range {self.config.fixed_thresholds[op_type]:g} fixed for {op_type}"
        return self._calibrated(root, dtype)

    def _possible(self, threshold: float, dtype: str, root: str, rule: str) -> float:
        """`threshold` of a rule, or `ConfigError` naming the rule: no scale of float32, all values become 0, or most of them saturate."""
        step = threshold / STEPS[dtype]
        where = f"{rule}: threshold {threshold:g} of tensor {root!r} is impossible"
        if step < SMALLEST_SCALE or threshold > LARGEST_FLOAT:
            raise ConfigError(f"{where}: {dtype} scale {step:g} is no normal float32 number")
        seen = self.statistics.get(root)
        if seen is None or seen.magnitude == 0.0:
            return threshold
        if seen.magnitude < step / 2:
            raise ConfigError(f"{where}: calibration reached {seen.magnitude:g}, all becomes 0")
        if (share := seen.share_beyond(threshold)) > MOST_SATURATED:
            raise ConfigError(f"{where}: {share:.0%} of the calibrated values lie beyond it")
        return threshold

    def _calibrated(self, root: str, dtype: str) -> tuple[float, str]:
        statistics = self.statistics.get(root)
        if statistics is None:
            raise ModelError(f"{self.model.path}: calibration holds no tensor {root!r}; calibrate this model again")
        if statistics.nonfinite:
            raise ModelError(f"{self.model.path}: tensor {root!r} took {statistics.nonfinite} NaN or infinite values in calibration")
        agreed = self._agreed(root, "observer")
        observer = str(agreed[0]) if agreed else self.config.observer
        threshold = threshold_of(statistics, observer, dtype, self.config.percentile)
        if threshold == 0.0:
            return 1.0, "range 1: always zero in calibration"
        name = "minmax" if dtype == "int16" else observer
        if name == AUTO:
            name = f"auto ({automatic_threshold(statistics, dtype, self.config.percentile)[0]})"
        return threshold, f"range by {name}" + (f", {agreed[1]}" if agreed else "")

    def _agreed(self, root: str, field: str) -> tuple[str, str] | None:
        """What the matching rules say about `field` of a group: (value, name of the rule), or None when they are silent."""
        speaking = [(getattr(rule, field), rule.pattern) for rule in self.rules.get(root, []) if getattr(rule, field) is not None]
        if len({value for value, _ in speaking}) > 1:
            sides = " and ".join(f"{pattern!r} says {value}" for value, pattern in speaking)
            raise ConfigError(f"quantization.rules: {field} of tensor {root!r} is contradictory: {sides}")
        return (speaking[0][0], f"rule {speaking[0][1]!r}") if speaking else None

    def _feeds_only_grids(self, members: list[str]) -> bool:
        """True when every reader of the group, views aside, is a GridSample that takes it as its grid and pads (no reflection)."""
        reads = [read for name in members for read in self.model.consumers.get(name, [])]
        final = [(node, position) for node, position in reads if node.op_type not in VIEW_OPS and node.output[0] not in members]
        is_output = any(name in self.model.outputs for name in members)
        return bool(final) and not is_output and all(_takes_grid(node, position) for node, position in final)


def _takes_grid(node: NodeProto, position: int) -> bool:
    reflects = any(attribute.name == "padding_mode" and attribute.s == b"reflection" for attribute in node.attribute)
    return node.op_type == "GridSample" and position == 1 and not reflects


def _grid_operands(model: FloatModel) -> tuple[str, ...]:
    return tuple(node.input[1] for node in model.nodes if node.op_type == "GridSample")


def _ends_grid_path(model: FloatModel, node: NodeProto) -> bool:
    """Matrix operators with weights end a grid path. A product of two activations, or with a constant matrix on its left, is geometry
    (projection, change of units) and belongs to the path."""
    return node.op_type in MATRIX_OPS and node.input[1] in model.constants


def _upstream(model: FloatModel, seeds: Iterable[str], ends: Callable[[FloatModel, NodeProto], bool]) -> set[str]:
    """Float activations from `seeds` back to, and including, the outputs of nodes where `ends` holds, or graph inputs."""
    floats = set(model.activations)
    found: set[str] = set()
    waiting = [name for name in seeds if name in floats]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        node = model.producer.get(name)
        if node is not None and not ends(model, node):
            waiting.extend(source for source in node.input if source in floats)
    return found
