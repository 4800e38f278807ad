"""Gradients by block and by kind of parameter."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipless.inspection.statistics import wide

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


class GradientTaker:
    """A context in which every parameter's gradient is reduced to norms and dropped at once.

    Gradients that were there before are put back on leaving.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]):
        self._squares: list[dict[str, Tensor]] = [{} for _ in blocks]
        self._blocks = [members(block) for _, block in blocks]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._saved: list[Tensor | None] = []
        self._open = ExitStack()

    def __enter__(self) -> "GradientTaker":
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters):
            raise ValueError(
                "a parameter has hooks that run when its gradient is ready (an optimizer inside the backward pass?); "
                "an inspection would set them off: inspect before they are added"
            )
        self._saved = [p.grad for p in self._parameters]
        owners = {id(m.parameter): (index, m) for index, block in enumerate(self._blocks) for m in block}
        for parameter in self._parameters:
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(self._taker(owners.get(id(parameter))))
            self._open.callback(hook.remove)
        for squares, block in zip(self._squares, self._blocks, strict=True):
            squares.update(dict.fromkeys(_groups_of(m for m in block if m.parameter.requires_grad), torch.zeros(())))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        for parameter, gradient in zip(self._parameters, self._saved, strict=True):
            parameter.grad = gradient

    def _taker(self, owner: tuple[int, Member] | None):
        def take(parameter: Tensor) -> None:
            if owner is not None and parameter.grad is not None:
                _add(self._squares[owner[0]], owner[1], parameter.grad)
            parameter.grad = None

        return take

    @property
    def groups(self) -> list[dict[str, float]]:
        """Norms of the gradients that were taken, by block and group."""
        return [_roots(squares) for squares in self._squares]


def gradient_norms(blocks: Sequence[tuple[str, nn.Module]]) -> list[dict[str, float]]:
    """Norms of the gradients that parameters hold now, by block and group."""
    found: list[dict[str, float]] = []
    for _, block in blocks:
        squares: dict[str, Tensor] = {}
        for member in members(block):
            if member.parameter.grad is not None:
                _add(squares, member, member.parameter.grad)
        found.append(_roots(squares))
    return found


@torch.no_grad()
def matrix_sizes(block: nn.Module) -> dict[str, float]:
    """Root mean square entry of a block's matrices, by group."""
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for member in members(block):
        if member.parameter.dim() < 2:
            continue
        _add(squares, member, member.parameter)
        for group, part in member.pieces(member.parameter):
            counts[group] = counts.get(group, 0) + part.numel()
    return {group: norm / max(counts[group], 1) ** 0.5 for group, norm in _roots(squares).items()}


def _groups_of(block: Iterable[Member]) -> list[str]:
    """Groups with a gradient to come, in one order: a fused matrix stands for three."""
    found = {name for m in block for name in (("query", "key", "value") if m.sizes else (m.group,))}
    return [group for group in GROUPS if group in found]


def _add(squares: dict[str, Tensor], member: Member, values: Tensor) -> None:
    for group, part in member.pieces(values.detach()):
        norm = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
        square = norm.to(wide(norm)).square()
        squares[group] = squares[group] + square if group in squares else square


def _roots(squares: dict[str, Tensor]) -> dict[str, float]:
    return {group: float(square) ** 0.5 for group, square in squares.items()}
