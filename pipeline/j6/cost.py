"""Time and traffic of one block.

    block = launch + load + max(busiest unit, streamed activations) + store of outputs

The units of a block work beside each other: padded MACs on the TAE, and on rows that it has finished the look-up tables of the VAE; element passes
on the VAE, moved elements on AAE and DTE.
All compute rates scale with the chip's nominal TOPS, because the chips of a family differ in clock and width together; the DDR rate and the CPU
do not. `load` is what a block cannot start without: its weights, and model inputs; activations that leave the chip stream behind the compute.
The rates come from the chip profile (`fitted_rates.yaml` says how each was fitted and its physical meaning).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from pipeline.errors import ChipError
from pipeline.j6.align import round_up
from pipeline.j6.assign import Assignment, unit_on
from pipeline.j6.chip import ChipProfile
from pipeline.j6.fuse import Block
from pipeline.j6.ir import DTYPE_BYTES, MATRIX_KINDS, Op, Tensor, conv_dims, macs, matmul_dims

MS = 1e3
WORK_RATES = {  # kind of work -> field of `Rates`
    "mac": "mac_ms",
    "matmul": "matmul_mac_ms",
    "element": "element_ms",
    "warp": "warp_ms",
    "scalar": "scalar_ms",
    "requantize": "requantize_ms",
    "cpu": "cpu_ms",
}
CONVERTER = "VPU"  # it brings the operands of a block to one width before the block starts; that rate was derived so (fitted_rates.yaml)
Work = tuple[tuple[str, str, float], ...]  # (unit, kind of work, amount)
# Passes over the data of composite vector operators: softmax = max, exp with sum, scale; normalisation = mean, variance, scale and shift.
VECTOR_PASSES = {"Softmax": 3, "LogSoftmax": 3, "LayerNormalization": 3, "InstanceNormalization": 3, "GroupNormalization": 3, "Gelu": 1, "Silu": 1}
GRID_SAMPLE_TAPS = 4  # bilinear
MIXED_WIDTH_KINDS = frozenset({"GridSample", "Where"})  # the grid is int16 beside an int8 image; a condition is no operand
# The output stage of a convolution adds, rescales and clamps on the way out (a fit that gave them a VAE rate of their own drove it to infinity).
FREE_EPILOGUE = frozenset({"Add", "Sub", "Mul", "Div", "Relu", "Clip", "BatchNormalization", "Requantize"})


@dataclass(frozen=True)
class Rates:
    """Rates of one chip in milliseconds per unit of work; built once per chip by `rates_of`."""

    mac_ms: float
    matmul_mac_ms: float
    int16_factor: float
    input_lanes: int
    output_lanes: int
    depthwise_lanes: int
    element_ms: float
    warp_ms: float
    scalar_ms: float
    requantize_ms: float
    requantize_unit: str
    cpu_ms: float
    launch_ms: float
    ddr_ms: float
    host_ms: float
    host_byte_ms: float
    contention_ms: float
    segment_ms: float
    cores: int


def rates_of(chip: ChipProfile, cores: int = 1) -> Rates:
    """Rates of one core of a chip; `cores` may share the work of a block.

    Raises `ChipError` when the profile lacks a number that the model needs, or has fewer cores.
    """
    if not 1 <= cores <= chip.number("cores"):
        raise ChipError(f"chip {chip.name}: core_num is {cores}; the chip has {chip.number('cores'):.0f}")
    tops = chip.number("peak_tops_int8") / chip.number("cores")
    ddr_gbps = chip.number("ddr_peak_gbps") * chip.number("ddr_efficiency")

    def byte_ms(key: str) -> float:
        return MS / (chip.number(key) * 1e9 * tops)

    return Rates(
        mac_ms=2 * MS / (tops * 1e12 * chip.number("tae_utilization")),
        matmul_mac_ms=2 * MS / (tops * 1e12 * chip.number("tae_matmul_utilization")),
        int16_factor=chip.number("tae_int16_factor"),
        input_lanes=int(chip.number("tae_input_lanes")),
        output_lanes=int(chip.number("tae_output_lanes")),
        depthwise_lanes=int(chip.number("channel_align")),
        element_ms=byte_ms("element_gbytes_per_tops"),
        warp_ms=byte_ms("warp_gbytes_per_tops"),
        scalar_ms=MS / (chip.number("spu_gelements_per_s") * 1e9),
        requantize_ms=MS / (chip.number("requantize_gelements_per_s") * 1e9),
        requantize_unit=unit_on("Requantize", chip),
        cpu_ms=MS / (chip.number("cpu_gelements_per_s_per_ghz") * chip.number("cpu_ghz") * 1e9),
        launch_ms=chip.number("launch_us_tops") / tops / MS,
        ddr_ms=MS / (ddr_gbps * 1e9),
        host_ms=chip.number("host_us_ghz") / chip.number("cpu_ghz") / MS,
        host_byte_ms=chip.number("host_us_ghz_per_mb") / chip.number("cpu_ghz") / MS / 1e6,
        contention_ms=chip.number("contention_us") / MS,
        segment_ms=chip.number("segment_us_ghz") / chip.number("cpu_ghz") / MS,
        cores=cores,
    )


@dataclass(frozen=True)
class BlockCost:
    """What a block costs. Times are ms; `units` lists (unit, ms), which run beside each other; bytes are DDR traffic."""

    units: tuple[tuple[str, float], ...]
    launch_ms: float
    weight_bytes: int
    input_bytes: int
    output_bytes: int
    stream_in_bytes: int
    stream_out_bytes: int
    load_ms: float
    stream_ms: float
    store_ms: float
    macs: int
    padded_macs: int
    cores: int = 1

    @property
    def compute_ms(self) -> float:
        """Time of the units without any memory traffic."""
        return busiest_ms(self.units)

    @property
    def ddr_bytes(self) -> int:
        """All bytes that cross the DDR bus."""
        return self.weight_bytes + self.input_bytes + self.output_bytes + self.stream_in_bytes + self.stream_out_bytes

    @property
    def total_ms(self) -> float:
        """Time of the block alone."""
        return self.launch_ms + self.load_ms + max(self.compute_ms, self.stream_ms) + self.store_ms


def busiest_ms(units: Iterable[tuple[str, float]]) -> float:
    """Time of a block's units: conversions on the VPU first, then the others beside each other, each on other rows of the block."""
    times = dict(units)
    return times.pop(CONVERTER, 0.0) + max(times.values(), default=0.0)


@dataclass(frozen=True)
class Traffic:
    """DDR bytes of a block as decided by tiling: weights, model inputs and outputs, and activations that do not stay on chip."""

    weights: int
    inputs: int
    outputs: int
    stream_in: int
    stream_out: int

    @property
    def stream(self) -> int:
        """Activation bytes in both directions."""
        return self.stream_in + self.stream_out


@dataclass(frozen=True)
class Compute:
    """Work of a block without memory traffic; `units` lists (unit, ms), each unit once; `work` is what they were computed from.

    `shared` are the same block on more cores; `block_cost` takes the quickest once the traffic is known.
    """

    units: tuple[tuple[str, float], ...]
    launch_ms: float
    macs: int
    padded_macs: int
    cores: int
    work: Work
    shared: tuple[Compute, ...] = ()


def compute_of(block: Block, assignment: Assignment, tensors: Mapping[str, Tensor], rates: Rates) -> Compute:
    """Time of `block` on its unit, with the epilogue on the VAE beside it. Cores share a block where that is quicker."""
    padded, work = _anchor(block.anchor, assignment.unit, tensors, rates)
    free = FREE_EPILOGUE if block.kind in MATRIX_KINDS else frozenset({"Requantize"})
    epilogue = sum(_vector_bytes(op, tensors) for op in block.ops[1:] if op.kind not in free)
    if epilogue:
        work = (*work, ("VAE", "element", float(epilogue)))
    converted = sum(requantized_elements(op, tensors) for op in block.ops[block.kind == "Requantize" :])
    if converted:
        work = (*work, (rates.requantize_unit, "requantize", float(converted)))
    launch_ms = rates.host_ms if assignment.unit == "CPU" else rates.launch_ms
    single = Compute(_unit_times(work, rates), launch_ms, sum(macs(op, tensors) for op in block.ops), padded, 1, work)
    if rates.cores == 1 or assignment.unit in ("CPU", "SPU"):
        return single
    return replace(single, shared=_shared(single, block, tensors, rates))


def _unit_times(work: Work, rates: Rates) -> tuple[tuple[str, float], ...]:
    """(unit, ms) in order of first use, each unit once."""
    times: dict[str, float] = {}
    for unit, kind, amount in work:
        times[unit] = times.get(unit, 0.0) + amount * getattr(rates, WORK_RATES[kind])
    return tuple(times.items())


def _shared(single: Compute, block: Block, tensors: Mapping[str, Tensor], rates: Rates) -> tuple[Compute, ...]:
    """The block cut into bands of rows, one a core, on two cores and more.

    One more launch joins the cores (assumed), and neighbours exchange the halo rows of their bands.
    """
    result = tensors[block.outputs[0]]
    rows = max(result.shape[0] * result.shape[2] if len(result.shape) == 4 else prod(result.shape[:-1]), 1)
    halo_ms = _band_halo_bytes(block, tensors) * rates.element_ms
    choices = []
    for cores in range(2, rates.cores + 1):
        units = tuple((unit, ms * -(-rows // cores) / rows) for unit, ms in single.units)
        exchange = (("DTE", (cores - 1) * halo_ms),) if halo_ms else ()
        choices.append(replace(single, units=(*units, *exchange), launch_ms=2 * single.launch_ms, cores=cores))
    return tuple(choices)


def _band_halo_bytes(block: Block, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the input rows that two neighbouring bands both read."""
    maps = [tensors[name] for name in block.inputs if len(tensors[name].shape) == 4]
    rows = sum(kernel_rows(block.anchor, tensors))
    return max((min(rows, t.shape[2]) * t.bytes // (t.shape[0] * t.shape[2]) for t in maps), default=0)


def block_cost(compute: Compute, traffic: Traffic, rates: Rates) -> BlockCost:
    """Cost of a block whose work and traffic are known, on as many cores as are quickest."""
    stream_ms = traffic.stream * rates.ddr_ms
    chosen = min((compute, *compute.shared), key=lambda choice: choice.launch_ms + max(busiest_ms(choice.units), stream_ms))
    return BlockCost(
        units=chosen.units,
        launch_ms=chosen.launch_ms,
        weight_bytes=traffic.weights,
        input_bytes=traffic.inputs,
        output_bytes=traffic.outputs,
        stream_in_bytes=traffic.stream_in,
        stream_out_bytes=traffic.stream_out,
        load_ms=(traffic.weights + traffic.inputs) * rates.ddr_ms,
        stream_ms=stream_ms,
        store_ms=traffic.outputs * rates.ddr_ms,
        macs=compute.macs,
        padded_macs=compute.padded_macs,
        cores=chosen.cores,
    )


def _anchor(op: Op, unit: str, tensors: Mapping[str, Tensor], rates: Rates) -> tuple[int, Work]:
    """(padded MACs, work) of a block's first operator."""
    if unit == "CPU":
        return 0, ((unit, "cpu", float(_elements(op, tensors))),)
    if unit == "TAE" and op.kind in MATRIX_KINDS:
        return _matrix(op, tensors, rates)
    if op.kind == "Requantize":
        return 0, ((unit, "requantize", float(requantized_elements(op, tensors))),)
    if unit == "SPU":
        return 0, ((unit, "scalar", float(_elements(op, tensors))),)
    if op.kind == "GridSample":
        return 0, ((unit, "warp", float(GRID_SAMPLE_TAPS * _moved_bytes(op, tensors))),)
    amount = _moved_bytes(op, tensors) if unit in ("DTE", "AAE") else _vector_bytes(op, tensors)
    return 0, ((unit, "element", float(amount)),)


def _matrix(op: Op, tensors: Mapping[str, Tensor], rates: Rates) -> tuple[int, Work]:
    """Padded MACs for the TAE; int16 on either side costs `int16_factor`. The DTE stuffs zeros into the input of a strided ConvTranspose."""
    padded = padded_macs(op, tensors, rates)
    stuffed = zero_stuffed_bytes(op, tensors)
    wide = rates.int16_factor if any(DTYPE_BYTES[tensors[name].dtype] > 1 for name in op.inputs) else 1.0
    product = "matmul" if op.kind == "MatMul" and not op.weights else "mac"
    stuffing: Work = (("DTE", "element", float(stuffed)),) if stuffed else ()
    return padded, (("TAE", product, padded * wide), *stuffing)


def zero_stuffed_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the input of a strided ConvTranspose after zeros are put between its elements, 0 for every other operator.

    A convolution array runs a transposed convolution as a convolution over that larger input.
    """
    if op.kind != "ConvTranspose" or max(op.attrs.get("strides", [1]), default=1) == 1:
        return 0
    source, result = tensors[op.inputs[0]], tensors[op.outputs[0]]
    return source.shape[1] * result.elements // result.shape[1] * DTYPE_BYTES[source.dtype]


def padded_macs(op: Op, tensors: Mapping[str, Tensor], rates: Rates) -> int:
    """MACs after padding the reduction (input channels x taps) and the output channels to the array's lanes.

    A depthwise convolution has no reduction over channels to fill the array with; its channels are padded to the documented multiple.
    """
    if op.kind in ("Conv", "ConvTranspose"):
        positions, channels_in, channels_out, groups, taps = conv_dims(op, tensors)
        if op.kind == "ConvTranspose":
            positions = tensors[op.outputs[0]].elements // tensors[op.outputs[0]].shape[1]
        if groups > 1 and channels_in == 1:
            return positions * round_up(groups * channels_out, rates.depthwise_lanes) * taps
        return positions * groups * round_up(channels_in * taps, rates.input_lanes) * round_up(channels_out, rates.output_lanes)
    batch, m, n, k = matmul_dims(op, tensors)
    return batch * m * round_up(n, rates.output_lanes) * round_up(k, rates.input_lanes)


def _elements(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Elements read and written."""
    return sum(tensors[name].elements for name in (*op.inputs, *op.outputs)) + macs(op, tensors)


def _moved_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes written, or read where an operator shrinks its input (pooling)."""
    written = sum(tensors[name].bytes for name in op.outputs)
    if op.kind in ("GlobalAveragePool", "GlobalMaxPool", "MaxPool", "AveragePool"):
        return max(written, tensors[op.inputs[0]].bytes)
    return written


def _vector_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes that the VAE processes: the larger side of the operator times its passes."""
    written = sum(tensors[name].bytes for name in op.outputs)
    read = max((tensors[name].bytes for name in op.inputs), default=0)
    return max(written, read) * VECTOR_PASSES.get(op.kind, 1)


def requantized_elements(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Elements that change between int8 and int16: by a Requantize, or because an operator other than a product takes operands of one width only.

    A convolution or product needs none: it takes and gives either width, and rescales in its output stage.
    """
    if op.kind in MATRIX_KINDS or op.kind in MIXED_WIDTH_KINDS:
        return 0
    names = (op.inputs[0], op.outputs[0]) if op.kind == "Requantize" else op.inputs
    integers = [tensors[name] for name in names if tensors[name].dtype in ("int8", "int16")]
    widths = {DTYPE_BYTES[tensor.dtype] for tensor in integers}
    if len(widths) < 2:
        return 0
    if op.kind == "Requantize":
        return tensors[op.outputs[0]].elements
    return sum(tensor.elements for tensor in integers if DTYPE_BYTES[tensor.dtype] < max(widths))


def channel_waste(op: Op, tensors: Mapping[str, Tensor], rates: Rates) -> float:
    """Share of the padded MACs that is padding, 0..1."""
    padded = padded_macs(op, tensors, rates)
    return 1 - macs(op, tensors) / padded if padded else 0.0


def shape_text(shape: tuple[int, ...]) -> str:
    """ "1x64x32x32"; "scalar" for a shape without dimensions."""
    return "x".join(map(str, shape)) if prod(shape) and shape else "scalar"


def kernel_rows(op: Op, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """(rows above, rows below) the matching input row that one output row of a map operator reads."""
    if op.kind in ("Resize", "Upsample"):
        return (0, 0) if op.attrs.get("mode", "nearest") == "nearest" else (0, 1)
    if op.kind == "ConvTranspose":
        rows, stride = tensors[op.operands[1]].shape[2], (op.attrs.get("strides") or [1])[0]
        return (ceil(rows / stride) - 1, 0)
    if op.kind not in ("Conv", "MaxPool", "AveragePool"):
        return (0, 0)
    rows = tensors[op.operands[1]].shape[2] if op.kind == "Conv" else op.attrs["kernel_shape"][0]
    extent = (rows - 1) * (op.attrs.get("dilations") or [1])[0]
    above = min((op.attrs.get("pads") or [extent // 2])[0], extent)
    return (above, extent - above)
