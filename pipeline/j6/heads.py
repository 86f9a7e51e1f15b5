"""Which head of a multi-task network a block belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.j6.fuse import FusedGraph

SHARED = "shared"


def head_names(fused: FusedGraph, heads: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Head of every block: by the prefixes of `heads` where given, otherwise by the outputs that it serves."""
    if heads:
        return [head_of((block.module, *block.anchor.sources, *block.outputs), heads) for block in fused.blocks]
    return heads_from_outputs(fused)


def head_of(names: Sequence[str], heads: Mapping[str, tuple[str, ...]]) -> str:
    """Head whose prefix matches one of the names (module path, node name, tensor name); "shared" when none does."""
    dotted = [name.strip("/").replace("/", ".") for name in names if name]
    for head, prefixes in heads.items():
        clean = [prefix.strip("/").replace("/", ".") for prefix in prefixes]
        if any(name == prefix or name.startswith(prefix + ".") for name in dotted for prefix in clean if prefix):
            return head
    return SHARED


def heads_from_outputs(fused: FusedGraph) -> list[str]:
    """A block serves the outputs that depend on it; it is shared when these belong to more than one head.

    The head of an output is the top-level module of the block that writes it, or the output's own name where the exporter left no modules.
    """
    writer = {name: block for block in fused.blocks for name in block.outputs}
    served: list[set[str]] = [set() for _ in fused.blocks]
    for name in fused.outputs:
        if name in writer:
            served[writer[name].index].add(writer[name].module.split(".")[0] or name.strip("/").split("/")[0])
    for block in reversed(fused.blocks):
        for name in block.inputs:
            if name in writer:
                served[writer[name].index] |= served[block.index]
    return [next(iter(heads)) if len(heads) == 1 else SHARED for heads in served]
