"""Tensors that the chip never stores, because the operator that reads them runs in the same block. They get no quantizer.

- activation behind a matrix operator or an addition: Conv -> Relu, Add -> Clip at zero (saturation of the accumulator's output);
- bias behind a matrix product: MatMul -> Add of a constant vector (int32 bias);
- the pieces of an activation or normalisation that the exporter wrote out (GELU, SiLU, LayerNorm, Softmax): the J6 compiler's own patterns
  decide, so that quantizer and compiler agree about what is one operator.
"""

from __future__ import annotations

from onnx import NodeProto

from pipeline.quantization.model import FloatModel

VIEW_OPS = frozenset(
    {
        "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Slice", "Split", "Gather", "GatherElements", "GatherND",
        "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "MaxPool",
    }
)  # fmt: skip
"""Operators whose output holds values of their first operand only: same storage, same scale."""

ACCUMULATING_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "BatchNormalization"})


def fused_tensors(model: FloatModel) -> dict[str, str]:
    """Tensor that is never stored -> tensor of the block that is."""
    fused = dict(_composite_tensors(model))
    for node in model.nodes:
        target = _epilogue(model, node)
        if target is not None:
            fused[node.output[0]] = target
    return {name: _last(fused, name) for name in fused}


def bias_operands(model: FloatModel, node: NodeProto) -> tuple[NodeProto, str] | None:
    """(MatMul node, name of the constant bias) when `node` is the bias addition of a matrix product, else None."""
    if node.op_type != "Add":
        return None
    for product, bias in (tuple(node.input), tuple(node.input)[::-1]):
        maker = model.producer.get(product)
        if maker is None or maker.op_type != "MatMul" or maker.input[1] not in model.constants or bias not in model.constants:
            continue
        width = model.shapes[product][-1]
        if model.constants[bias].shape == (width,) and _is_private(model, product):
            return maker, bias
    return None


def _epilogue(model: FloatModel, node: NodeProto) -> str | None:
    """Output of the operator that runs in the same block as `node` and takes over its result, if there is one."""
    if node.op_type not in ACCUMULATING_OPS or not _is_private(model, node.output[0]):
        return None
    reader = model.consumers[node.output[0]][0][0]
    if reader.op_type == "Relu" or (reader.op_type == "Clip" and _clips_at_zero(model, reader)):
        return reader.output[0]
    matched = bias_operands(model, reader)
    return reader.output[0] if matched is not None and matched[0].name == node.name else None


def _clips_at_zero(model: FloatModel, node: NodeProto) -> bool:
    low = model.constants.get(node.input[1]) if len(node.input) > 1 else None
    return low is not None and float(low) == 0.0


def _is_private(model: FloatModel, tensor: str) -> bool:
    return len(model.consumers.get(tensor, [])) == 1 and tensor not in model.outputs


def _last(fused: dict[str, str], name: str) -> str:
    while name in fused:
        name = fused[name]
    return name


def _composite_tensors(model: FloatModel) -> dict[str, str]:
    by_name = {node.name: node for node in model.nodes}
    inner: dict[str, str] = {}
    for names in model.composites:
        members = [by_name[name] for name in names if name in by_name]
        made = {name for node in members for name in node.output}
        read_outside = {
            name for name in made if name in model.outputs or any(reader.name not in names for reader, _ in model.consumers.get(name, []))
        }
        if len(read_outside) == 1:
            target = read_outside.pop()
            inner.update({name: target for name in made if name != target})
    return inner
