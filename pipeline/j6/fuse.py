"""Fusion: operators to blocks, the pieces of work that the chip's units run without writing intermediate results back.

Three steps, each a rule of its own:
1. composites: the pieces of SiLU, GELU, LayerNorm and softmax that an exporter wrote out become one operator again;
2. views: Reshape and friends move no data, so their outputs are other names of the same storage;
3. epilogues: element-wise work joins the block that makes its input when nothing else reads that input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.j6.ir import MATRIX_KINDS, VIEW_KINDS, Graph, Op, Tensor

TABLE_KINDS = frozenset(
    {
        "Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Elu",
        "Selu", "Celu", "Softplus", "Softsign", "Mish", "Gelu", "Silu", "Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos", "Pow",
        "BatchNormalization", "Requantize", "ThresholdedRelu", "Not", "Tan", "Atan", "Asin", "Acos",
    }
)  # fmt: skip
BINARY_KINDS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "And", "Or", "Where"}
)
ELEMENTWISE_KINDS = TABLE_KINDS | BINARY_KINDS
MAP_KINDS = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize"}) | ELEMENTWISE_KINDS  # they work on [N,C,H,W] maps


@dataclass(frozen=True)
class Block:
    """A fused piece of work. `ops[0]` is its anchor, the rest its epilogue; names are storage roots (views resolved)."""

    index: int
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def anchor(self) -> Op:
        """The operator that gives the block its kind and unit."""
        return self.ops[0]

    @property
    def kind(self) -> str:
        """Operator type of the anchor."""
        return self.ops[0].kind

    @property
    def name(self) -> str:
        """Name of the anchor's ONNX node; unique in a plan because node names are made unique on import."""
        return self.ops[0].name

    @property
    def module(self) -> str:
        """Module path of the anchor."""
        return self.ops[0].module


@dataclass(frozen=True)
class FusedGraph:
    """Blocks in execution order, their tensors, and `roots`: view name -> storage name."""

    graph: Graph
    blocks: tuple[Block, ...]
    roots: dict[str, str]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensor table of the imported graph."""
        return self.graph.tensors

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph inputs."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Storage names of the graph outputs."""
        return tuple(dict.fromkeys(self.roots.get(name, name) for name in self.graph.outputs))


def fuse(graph: Graph, enable: bool = True) -> FusedGraph:
    """Group a graph into blocks; `enable=False` keeps one block per operator (optimize level O0)."""
    ops = _composites(graph) if enable else list(graph.ops)
    views = _views(graph, ops, enable)
    roots = _view_roots(ops, views)
    work = [op for op in ops if op.name not in views]
    groups = _epilogues(graph, work, roots) if enable else [[op] for op in work]
    readers = _reader_groups(groups, roots)
    outputs = {roots.get(name, name) for name in graph.outputs}
    blocks = tuple(_block(index, members, roots, readers, outputs) for index, members in enumerate(groups))
    return FusedGraph(graph, blocks, roots)


# --- composites ---------------------------------------------------------------------------------------------------------------------


class _Matcher:
    """Look-ups that the composite patterns share."""

    def __init__(self, graph: Graph) -> None:
        self.ops = list(graph.ops)
        self.producer = graph.producers()
        self.consumers = graph.consumers()
        self.outputs = set(graph.outputs)
        self.used: set[int] = set()

    def made_by(self, name: str, kinds: Iterable[str]) -> int | None:
        """Index of the operator that writes `name` if it is one of `kinds`."""
        index = self.producer.get(name)
        return index if index is not None and self.ops[index].kind in kinds else None

    def only_reader(self, name: str, kinds: Iterable[str]) -> int | None:
        """Index of the single reader of `name` if it is one of `kinds` and `name` is no graph output."""
        readers = self.consumers.get(name, [])
        if len(readers) != 1 or name in self.outputs or self.ops[readers[0]].kind not in kinds:
            return None
        return readers[0]


def _composites(graph: Graph) -> list[Op]:
    """Replace decomposed activations and normalisations by single operators placed at their last member."""
    matcher = _Matcher(graph)
    found: dict[int, tuple[tuple[int, ...], str]] = {}
    patterns: tuple[tuple[str, str, Callable[[_Matcher, int], tuple[int, ...] | None]], ...] = (
        ("Sigmoid", "Silu", _match_silu),
        ("HardSigmoid", "HardSwish", _match_silu),
        ("Erf", "Gelu", _match_gelu),
        ("Sqrt", "LayerNormalization", _match_layer_norm),
        ("Exp", "Softmax", _match_softmax),
    )
    for index, op in enumerate(graph.ops):
        for start, kind, match in patterns:
            members = match(matcher, index) if op.kind == start else None
            if members and not matcher.used.intersection(members):
                matcher.used.update(members)
                found[max(members)] = (tuple(sorted(members)), kind)
    return [_merge(graph, *found[i]) if i in found else op for i, op in enumerate(graph.ops) if i in found or i not in matcher.used]


def _merge(graph: Graph, members: tuple[int, ...], kind: str) -> Op:
    """One operator with the outside inputs and the last output of its members."""
    ops = [graph.ops[index] for index in members]
    inner = {name for op in ops for name in op.outputs}
    operands = tuple(dict.fromkeys(name for op in ops for name in op.operands if name not in inner))
    inputs = tuple(name for name in operands if not graph.tensors[name].constant)
    weights = tuple(name for name in operands if graph.tensors[name].constant)
    last = ops[-1]
    return Op(last.name, kind, operands, inputs, weights, last.outputs, {}, tuple(op.name for op in ops), last.module)


def _match_silu(matcher: _Matcher, index: int) -> tuple[int, ...] | None:
    """x * sigmoid(x), and x * hardsigmoid(x)."""
    gate = matcher.ops[index]
    product = matcher.only_reader(gate.outputs[0], ("Mul",))
    if product is not None and gate.inputs[0] in matcher.ops[product].inputs:
        return index, product
    return None


def _match_gelu(matcher: _Matcher, index: int) -> tuple[int, ...] | None:
    """x/sqrt(2) -> erf -> +1 -> *x -> *0.5, with the two last in either order."""
    erf = matcher.ops[index]
    scale = matcher.made_by(erf.inputs[0], ("Div", "Mul"))
    plus = matcher.only_reader(erf.outputs[0], ("Add",))
    if scale is None or plus is None:
        return None
    product = matcher.only_reader(matcher.ops[plus].outputs[0], ("Mul",))
    if product is None:
        return None
    members = [scale, index, plus, product]
    source = matcher.ops[scale].inputs[0]
    other = next((name for name in matcher.ops[product].inputs if name != matcher.ops[plus].outputs[0]), None)
    if other is not None and other != source:  # (x * 0.5) * (1 + erf)
        half = matcher.made_by(other, ("Mul",))
        if half is None or source not in matcher.ops[half].inputs:
            return None
        return (*members, half)
    last = matcher.only_reader(matcher.ops[product].outputs[0], ("Mul",))
    return (*members, last) if last is not None and matcher.ops[last].weights else tuple(members)


def _match_layer_norm(matcher: _Matcher, index: int) -> tuple[int, ...] | None:
    """ReduceMean -> Sub -> square -> ReduceMean -> Add -> Sqrt -> Div [-> Mul -> Add], found from its Sqrt."""
    add = matcher.made_by(matcher.ops[index].inputs[0], ("Add",))
    mean = matcher.made_by(matcher.ops[add].inputs[0], ("ReduceMean",)) if add is not None else None
    square = matcher.made_by(matcher.ops[mean].inputs[0], ("Pow", "Mul")) if mean is not None else None
    centred = matcher.made_by(matcher.ops[square].inputs[0], ("Sub",)) if square is not None else None
    divide = matcher.only_reader(matcher.ops[index].outputs[0], ("Div",))
    if centred is None or divide is None or add is None or mean is None or square is None:
        return None
    first = next((i for name in matcher.ops[centred].inputs if (i := matcher.made_by(name, ("ReduceMean",))) is not None), None)
    members = [index, add, mean, square, centred, divide, *([first] if first is not None else [])]
    for kind in ("Mul", "Add"):
        tail = matcher.only_reader(matcher.ops[members[-1] if kind == "Add" and members[-1] > divide else divide].outputs[0], (kind,))
        if tail is None or not matcher.ops[tail].weights:
            break
        members.append(tail)
    return tuple(members)


def _match_softmax(matcher: _Matcher, index: int) -> tuple[int, ...] | None:
    """ReduceMax -> Sub -> Exp -> ReduceSum -> Div, found from its Exp."""
    exp = matcher.ops[index]
    sub = matcher.made_by(exp.inputs[0], ("Sub",))
    readers = matcher.consumers.get(exp.outputs[0], [])
    total = next((i for i in readers if matcher.ops[i].kind == "ReduceSum"), None)
    divide = next((i for i in readers if matcher.ops[i].kind == "Div"), None)
    if sub is None or total is None or divide is None or len(readers) != 2:
        return None
    peak = next((i for name in matcher.ops[sub].inputs if (i := matcher.made_by(name, ("ReduceMax",))) is not None), None)
    return tuple(i for i in (peak, sub, index, total, divide) if i is not None)


# --- views and epilogues ------------------------------------------------------------------------------------------------------------


def _views(graph: Graph, ops: Sequence[Op], layout: bool) -> set[str]:
    """Names of operators that move no data: views, and (`layout`) transposes between ONNX's channel-first maps and the chip's channel-last ones."""
    producer = {name: op for op in ops for name in op.outputs}
    readers: dict[str, list[Op]] = {}
    for op in ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    views = {op.name for op in ops if op.kind in VIEW_KINDS}
    if layout:
        views |= {op.name for op in ops if op.kind == "Transpose" and op.inputs and _is_layout_change(graph, op, producer, readers)}
    return views


def _is_layout_change(graph: Graph, op: Op, producer: Mapping[str, Op], readers: Mapping[str, list[Op]]) -> bool:
    """[N,C,H,W] -> [N,H,W,C] of a map, back for a map's reader, or the same with H and W flattened."""
    order = tuple(op.attrs.get("perm", ()))
    source, result = op.inputs[0], op.outputs[0]
    if order == (0, 2, 3, 1):
        return _is_map(producer.get(source))
    if order == (0, 3, 1, 2):
        return bool(readers.get(result)) and all(reader.kind in MAP_KINDS for reader in readers[result])
    if order != (0, 2, 1):
        return False
    before = producer.get(source)
    flattened = before is not None and before.kind in VIEW_KINDS and bool(before.inputs) and _is_map(producer.get(before.inputs[0]))
    after = readers.get(result, [])
    return flattened or (bool(after) and all(r.kind in VIEW_KINDS and len(graph.tensors[r.outputs[0]].shape) == 4 for r in after))


def _is_map(op: Op | None) -> bool:
    return op is not None and op.kind in MAP_KINDS


def _view_roots(ops: Sequence[Op], views: set[str]) -> dict[str, str]:
    """View output -> name of the storage it looks at."""
    roots: dict[str, str] = {}
    for op in ops:
        if op.name in views and op.inputs:
            source = op.inputs[0]
            roots.update(dict.fromkeys(op.outputs, roots.get(source, source)))
    return roots


def _reading_ops(ops: Sequence[Op], roots: dict[str, str]) -> dict[str, int]:
    """Storage name -> number of operators that read it."""
    counts: dict[str, int] = {}
    for op in ops:
        for name in {roots.get(name, name) for name in op.inputs}:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _epilogues(graph: Graph, ops: Sequence[Op], roots: dict[str, str]) -> list[list[Op]]:
    """Append element-wise operators to the block that makes their (only locally read) input.

    A two-input operator joins the block that finishes last, so the other operand is ready by then.
    """
    reads = _reading_ops(ops, roots)
    fixed = {roots.get(name, name) for name in graph.outputs}
    groups: list[list[Op]] = []
    tail: dict[str, int] = {}  # storage name -> group whose last operator wrote it
    for op in ops:
        sources = [roots.get(name, name) for name in op.inputs]
        open_groups = [tail[name] for name in sources if name in tail and reads[name] == 1 and name not in fixed]
        target = max(open_groups, default=None)
        latest = max((tail[name] for name in sources if name in tail), default=None)
        if op.kind in ELEMENTWISE_KINDS and target is not None and target == latest and _may_absorb(groups[target], graph, op):
            groups[target].append(op)
        else:
            target = len(groups)
            groups.append([op])
        tail.update(dict.fromkeys(op.outputs, target))
    return groups


def _may_absorb(group: list[Op], graph: Graph, op: Op) -> bool:
    """Matrix and element-wise blocks take an epilogue of the same size; a broadcast that grows the result does not fuse."""
    if group[0].kind not in MATRIX_KINDS and group[0].kind not in ELEMENTWISE_KINDS:
        return False
    return graph.tensors[op.outputs[0]].elements == graph.tensors[group[-1].outputs[0]].elements


def _reader_groups(groups: list[list[Op]], roots: dict[str, str]) -> dict[str, set[int]]:
    readers: dict[str, set[int]] = {}
    for index, members in enumerate(groups):
        for op in members:
            for name in op.inputs:
                readers.setdefault(roots.get(name, name), set()).add(index)
    return readers


def _block(index: int, members: list[Op], roots: dict[str, str], readers: dict[str, set[int]], graph_outputs: set[str]) -> Block:
    made = [name for op in members for name in op.outputs]
    inputs = dict.fromkeys(roots.get(name, name) for op in members for name in op.inputs)
    weights = dict.fromkeys(name for op in members for name in op.weights)
    outputs = [name for name in made if name in graph_outputs or readers.get(name, set()) - {index}] or made[-1:]
    return Block(index, tuple(members), tuple(name for name in inputs if name not in made), tuple(weights), tuple(outputs))
