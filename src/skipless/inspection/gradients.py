"""Parameters of a block: their sizes and their gradients, one by one and by kind."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    name: str
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

    def label(self, group: str) -> str:
        """The parameter's name, with the part of it where it is cut into three."""
        return self.name if self.sizes is None else f"{self.name} ({group} part)"


def members(block: nn.Module) -> list[Member]:
    """Every parameter of the block with its group."""
    return [_member(block, name, parameter) for name, parameter in block.named_parameters()]


def _member(block: nn.Module, name: str, parameter: nn.Parameter) -> Member:
    parts = name.lower().split(".")
    in_attention = any("attn" in word or "attention" in word for word in (*parts[:-1], *_classes(block, name)))
    if in_attention and any(part in _FUSED for part in parts):
        return _fused(block, name, parameter)
    for group, names in _NAMES.items():
        if in_attention and any(part in names for part in parts):
            return Member(name, parameter, group)
    if any("norm" in part or part.startswith("ln_") or part in ("ln1", "ln2", "ln") for part in parts):
        return Member(name, parameter, "norm")
    if in_attention:
        return Member(name, parameter, "output" if any(p in ("weight", "bias") for p in parts[-1:]) else "other")
    return Member(name, parameter, "mlp" if parts[-1] in ("weight", "bias") else "other")


def _classes(block: nn.Module, name: str) -> Iterator[str]:
    """Classes of those modules around a parameter that are members of a list, and so have no name; in lower case."""
    owner = block
    for part in name.split(".")[:-1]:
        listed = isinstance(owner, nn.ModuleList | nn.Sequential)
        owner = owner.get_submodule(part)
        if listed:
            yield type(owner).__name__.lower()


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
        return Member(name, parameter, "other")
    if not interleaved and kv_heads != heads and rows % parts == 0:
        width = rows // parts
        return Member(name, parameter, "fused", axis, (heads * width, kv_heads * width, kv_heads * width))
    if rows % 3:
        return Member(name, parameter, "other")
    return Member(name, parameter, "fused", axis, (rows // 3, rows // 3, rows // 3), interleaved)


def _heads(block: nn.Module) -> tuple[int, int]:
    """(query heads, key heads) from the modules' attributes or their config; zeros where neither says."""
    for module in block.modules():
        for source in (module, getattr(module, "config", None)):
            heads = getattr(source, "num_attention_heads", None) or getattr(source, "num_heads", None)
            if isinstance(heads, int):
                kv_heads = getattr(source, "num_key_value_heads", None)
                return heads, kv_heads if isinstance(kv_heads, int) else heads
    return 0, 0


Squares = dict[tuple[str, str], Tensor]  # squared norms by (group, label)


class GradientTaker:
    """A context in which every parameter's gradient is reduced to norms and dropped at once.

    Gradients that were there before are put back on leaving.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]):
        self._squares: list[Squares] = [{} for _ in blocks]
        self._reached: set[int] = set()
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
        owners: dict[int, list[tuple[int, Member]]] = {}  # blocks may share a parameter
        for index, block in enumerate(self._blocks):
            for member in block:
                owners.setdefault(id(member.parameter), []).append((index, member))
        for parameter in self._parameters:
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(self._taker(owners.get(id(parameter), [])))
            self._open.callback(hook.remove)
        for squares, block in zip(self._squares, self._blocks, strict=True):
            squares.update(_nothing(block))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        for parameter, gradient in zip(self._parameters, self._saved, strict=True):
            parameter.grad = gradient

    def _taker(self, owners: Sequence[tuple[int, Member]]):
        def take(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._reached.add(id(parameter))
                for index, member in owners:
                    _add(self._squares[index], member, parameter.grad)
            parameter.grad = None

        return take

    @property
    def taken(self) -> "list[BlockGradients]":
        """Norms of the gradients that were taken, by block; 0 where none came."""
        pairs = zip(self._squares, self._blocks, strict=True)
        return [BlockGradients.of(squares, self._unused(block)) for squares, block in pairs]

    def _unused(self, block: Sequence[Member]) -> tuple[str, ...]:
        """Names of parameters that learn and that nothing was computed with, of modules of which all are so.

        None where the whole block is. A module that leaves one of several out, as for a kind of input, means it.
        """
        learning = [each for each in block if each.parameter.requires_grad]
        reached = {_together(each.name) for each in learning if id(each.parameter) in self._reached}
        used = {name.rpartition(".")[0] for name in reached}
        unused = [each.name for each in learning if _together(each.name).rpartition(".")[0] not in used]
        return tuple(unused) if reached else ()


@dataclass(frozen=True)
class BlockGradients:
    """Gradient norms of one block's parameters that learn: by group, and of each matrix. unused: the names of those
    that nothing depends on at all."""

    groups: dict[str, float]
    matrices: dict[str, float]
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, squares: Squares, unused: tuple[str, ...] = ()) -> "BlockGradients":
        """Experts of a mixture count together: a batch need not reach all of them."""
        labels = list(squares)
        values = torch.stack([squares[label].double().cpu() for label in labels]).tolist() if labels else []
        groups: dict[str, float] = {}
        matrices: dict[str, float] = {}
        for (group, label), value in zip(labels, values, strict=True):
            groups[group] = groups.get(group, 0.0) + value
            if label:
                name = _together(label)
                matrices[name] = matrices.get(name, 0.0) + value
        ordered = {group: groups[group] ** 0.5 for group in GROUPS if group in groups}
        return cls(ordered, {name: value**0.5 for name, value in matrices.items()}, unused)


def _together(label: str) -> str:
    """One name for the same parameter of all experts."""
    return re.sub(r"(experts?)\.(expert_)?\d+\.", r"\1.*.", label)


def gradients_held(blocks: Sequence[tuple[str, nn.Module]]) -> list[BlockGradients]:
    """Norms of the gradients that parameters hold now, by block."""
    found = []
    for _, block in blocks:
        squares: Squares = {}
        for member in members(block):
            if member.parameter.grad is not None:
                _add(squares, member, member.parameter.grad)
        found.append(BlockGradients.of(squares))
    return found


@dataclass(frozen=True)
class Weight:
    """One parameter of a block, or a part of a fused one: root mean square entry, not finite where an entry is not;
    empty, how many of its rows (experts, where it is three-dimensional) or columns are all zero; alike, whether its
    rows are all the same, going by the first, a middle and the last; reads, the length of a row."""

    group: str
    matrix: bool
    entries: int
    size: float
    empty: int
    alike: bool = False
    reads: int = 1


@torch.no_grad()
def weights_of(block: nn.Module) -> dict[str, Weight]:
    """Every parameter of the block by its label."""
    found, numbers = [], []
    for member in members(block):
        for group, part in member.pieces(member.parameter.detach()):
            if not part.numel() or not part.is_floating_point() or part.is_meta:
                continue
            whole = part.flatten(1) if part.dim() > 1 else part[None] if part.dim() else part[None, None]
            rows = torch.linalg.vector_norm(whole, dim=1, dtype=wide(whole))
            columns = torch.linalg.vector_norm(whole, dim=0, dtype=torch.float32) if part.dim() == 2 else rows
            size = torch.linalg.vector_norm(rows) / part.numel() ** 0.5
            some = whole[[0, len(whole) // 2, -1]]
            alike = (some == some[:1]).all() & (len(whole) > 2)
            counts = ((rows == 0).sum(), (columns == 0).sum(), alike)
            numbers.append(torch.stack([size, *(count.to(size) for count in counts)]))
            found.append(
                (member.label(group), group, part.dim() > 1, part.numel(), part.shape[-1] if part.dim() else 1)
            )
    values = torch.stack([each.to("cpu") for each in numbers]).tolist() if numbers else []
    return {
        label: Weight(group, matrix, entries, size, int(max(empty, across)) * matrix, bool(alike and matrix), reads)
        for (label, group, matrix, entries, reads), (size, empty, across, alike) in zip(found, values, strict=True)
    }


def matrix_sizes(weights: Mapping[str, Weight]) -> dict[str, float]:
    """Root mean square entry of a block's matrices, by group."""
    totals: dict[str, tuple[float, int]] = {}
    for weight in (each for each in weights.values() if each.matrix):
        square, entries = totals.get(weight.group, (0.0, 0))
        totals[weight.group] = square + weight.size**2 * weight.entries, entries + weight.entries
    return {group: (square / entries) ** 0.5 for group, (square, entries) in totals.items()}


def _nothing(block: Iterable[Member]) -> Squares:
    """Zeros for every parameter that learns: a fused matrix stands for three."""
    found: Squares = {}
    for member in block:
        if member.parameter.requires_grad:
            groups = ("query", "key", "value") if member.sizes else (member.group,)
            found |= {_place(member, group): torch.zeros(()) for group in groups}
    return found


def _place(member: Member, group: str) -> tuple[str, str]:
    return group, member.label(group) if member.parameter.dim() > 1 else ""


def _add(squares: Squares, member: Member, values: Tensor) -> None:
    for group, part in member.pieces(values.detach()):
        norm = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
        square, place = norm.to(wide(norm)).square(), _place(member, group)
        squares[place] = squares[place] + square if place in squares else square
