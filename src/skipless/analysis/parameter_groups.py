"""What each parameter of a block does: query, key, value, output, mlp or norm, in the names of many libraries."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

GROUPS = ("query", "key", "value", "output", "mlp", "norm", "other")

_NAMES = {
    "query": ("query", "q_proj", "q_lin", "to_q", "wq", "q"),
    "key": ("key", "k_proj", "k_lin", "to_k", "wk", "k"),
    "value": ("value", "v_proj", "v_lin", "to_v", "wv", "v"),
}
_FUSED = ("c_attn", "query_key_value", "qkv", "qkv_proj", "wqkv", "in_proj", "in_proj_weight", "in_proj_bias", "to_qkv")
_INTERLEAVED = ("query_key_value",)  # GPT-NeoX and Bloom: query, key and value of each head side by side


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter of a block: its group, or how to cut a fused query-key-value matrix into three."""

    parameter: nn.Parameter
    group: str
    axis: int = 0
    sizes: tuple[int, int, int] | None = None
    heads: int | None = None

    def pieces(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(group, part) of the parameter's values or gradient."""
        if self.sizes is None:
            yield self.group, values
            return
        axis = self.axis
        if self.heads is not None:  # (heads · 3 · head_width) → (3 · heads · head_width)
            values = values.unflatten(axis, (self.heads, 3, -1)).transpose(axis, axis + 1).flatten(axis, axis + 2)
        yield from zip(("query", "key", "value"), values.split(self.sizes, dim=axis), strict=True)


def members(block: nn.Module) -> list[Member]:
    """Every parameter of the block with its group."""
    return [_member(block, name, parameter) for name, parameter in block.named_parameters()]


def _member(block: nn.Module, name: str, parameter: nn.Parameter) -> Member:
    parts = name.lower().split(".")
    in_attention = any("attn" in part or "attention" in part for part in parts[:-1])
    if in_attention and any(part in _FUSED for part in parts):
        return _fused(block, name, parameter)
    for group, names in _NAMES.items():
        if in_attention and any(part in names for part in parts):
            return Member(parameter, group)
    if any("norm" in part or part.startswith("ln_") or part in ("ln1", "ln2", "ln") for part in parts):
        return Member(parameter, "norm")
    if in_attention:
        return Member(parameter, "output" if any(p in ("weight", "bias") for p in parts[-1:]) else "other")
    return Member(parameter, "mlp" if parts[-1] in ("weight", "bias") else "other")


def _fused(block: nn.Module, name: str, parameter: nn.Parameter) -> Member:
    owner_name = name.rpartition(".")[0]
    owner = block.get_submodule(owner_name)
    # transformers' Conv1D keeps its matrix as (in, out), everyone else as (out, in)
    axis = parameter.dim() - 1 if type(owner).__name__ == "Conv1D" else 0
    heads, kv_heads = _heads(block)
    rows = parameter.shape[axis]
    parts = heads + 2 * kv_heads if heads and kv_heads else 3
    interleaved = heads if owner_name.rpartition(".")[2].lower() in _INTERLEAVED else None
    if interleaved and rows % (3 * interleaved):
        return Member(parameter, "other")
    if not interleaved and kv_heads != heads and rows % parts == 0:
        width = rows // parts
        return Member(parameter, "fused", axis, (heads * width, kv_heads * width, kv_heads * width))
    if rows % 3:
        return Member(parameter, "other")
    return Member(parameter, "fused", axis, (rows // 3, rows // 3, rows // 3), interleaved)


def _heads(block: nn.Module) -> tuple[int, int]:
    """(query heads, key heads) from the modules' attributes or their config; zeros where neither says."""
    for module in block.modules():
        for source in (module, getattr(module, "config", None)):
            heads = getattr(source, "num_attention_heads", None) or getattr(source, "num_heads", None)
            if isinstance(heads, int):
                kv_heads = getattr(source, "num_key_value_heads", None)
                return heads, kv_heads if isinstance(kv_heads, int) else heads
    return 0, 0
