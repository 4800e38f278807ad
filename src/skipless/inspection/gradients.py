"""Parameters of a block: their sizes and their gradients, one by one and by kind."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from skipless.inspection.statistics import fetched, wide

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


Norms = dict[tuple[str, str], list[Tensor]]  # norms of parts by (group, label); none where nothing came


class GradientTaker:
    """A context in which every parameter's gradient is reduced to norms and dropped at once.

    Gradients that were there before are put back on leaving.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]):
        self._norms: list[Norms] = [{} for _ in blocks]
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
        for norms, block in zip(self._norms, self._blocks, strict=True):
            norms.update(_nothing(block))
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
                    _add(self._norms[index], member, parameter.grad)
            parameter.grad = None

        return take

    def missed(self, module: nn.Module) -> bool:
        """Whether a module has parameters of its own that learn, and no gradient came to any of them."""
        learning = [id(p) for p in module.parameters(recurse=False) if p.requires_grad]
        return bool(learning) and not any(each in self._reached for each in learning)

    @property
    def taken(self) -> "list[BlockGradients]":
        """Norms of the gradients that were taken, by block; 0 where none came."""
        return BlockGradients.of(self._norms, [self._unused(block) for block in self._blocks])

    def _unused(self, block: Sequence[Member]) -> tuple[str, ...]:
        """Names of parameters that learn and that nothing was computed with, of modules of which all are so.

        None where the whole block is. A module that leaves one of several out, as for a kind of input, means it.
        """
        learning = [each for each in block if each.parameter.requires_grad]
        reached = {shared_name(each.name) for each in learning if id(each.parameter) in self._reached}
        used = {name.rpartition(".")[0] for name in reached}
        unused = [each.name for each in learning if shared_name(each.name).rpartition(".")[0] not in used]
        return tuple(unused) if reached else ()


def reaches(output: Tensor, target: Tensor) -> bool:
    """Whether a gradient would pass from one tensor to the other."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node is target.grad_fn:
            return True
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
    return False


@dataclass(frozen=True)
class BlockGradients:
    """Gradient norms of one block's parameters that learn: by group, and of each matrix. unused: the names of those
    that nothing depends on at all."""

    groups: dict[str, float]
    matrices: dict[str, float]
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, norms: Sequence[Norms], unused: Sequence[tuple[str, ...]]) -> "list[BlockGradients]":
        """Of every block, fetched at once. Experts of a mixture count together: a batch need not reach all of them."""
        values = iter(fetched([part for block in norms for parts in block.values() for part in parts]))
        return [
            cls._of({place: sum(float(next(values)) ** 2 for _ in parts) for place, parts in block.items()}, names)
            for block, names in zip(norms, unused, strict=True)
        ]

    @classmethod
    def _of(cls, squares: Mapping[tuple[str, str], float], unused: tuple[str, ...]) -> "BlockGradients":
        groups: dict[str, float] = {}
        matrices: dict[str, float] = {}
        for (group, label), value in squares.items():
            groups[group] = groups.get(group, 0.0) + value
            if label:
                name = shared_name(label)
                matrices[name] = matrices.get(name, 0.0) + value
        ordered = {group: groups[group] ** 0.5 for group in GROUPS if group in groups}
        return cls(ordered, {name: value**0.5 for name, value in matrices.items()}, unused)


def shared_name(label: str) -> str:
    """One name for the same parameter of all experts."""
    return re.sub(r"(experts?)\.(expert_)?\d+\.", r"\1.*.", label)


def gradients_held(blocks: Sequence[tuple[str, nn.Module]]) -> list[BlockGradients]:
    """Norms of the gradients that parameters hold now, by block."""
    found: list[Norms] = [{} for _ in blocks]
    for norms, (_, block) in zip(found, blocks, strict=True):
        for member in members(block):
            if member.parameter.grad is not None:
                _add(norms, member, member.parameter.grad)
    return BlockGradients.of(found, [()] * len(found))


@dataclass(frozen=True)
class Weight:
    """One parameter of a block, or a part of a fused one: root mean square entry, not finite where an entry is not;
    empty, how many of its rows (experts, where it is three-dimensional) or columns are all zero; alike, whether its
    rows are all the same, going by the first, a middle and the last; reads, the length of a row; zeros, the share of
    entries that are zero."""

    group: str
    matrix: bool
    entries: int
    size: float
    empty: int
    alike: bool = False
    reads: int = 1
    zeros: float = 0.0


@torch.no_grad()
def weights_of(blocks: Sequence[nn.Module]) -> list[dict[str, Weight]]:
    """Every parameter of every block by its label, fetched at once."""
    parts: list[tuple[int, str, str, Tensor]] = []
    for index, block in enumerate(blocks):
        for member in members(block):
            for group, part in member.pieces(member.parameter.detach()):
                if part.numel() and part.is_floating_point() and not part.is_meta:
                    parts.append((index, member.label(group), group, part))
    wholes = [p.flatten(1) if p.dim() > 1 else p[None] if p.dim() else p[None, None] for *_, p in parts]
    rows = [torch.linalg.vector_norm(whole, dim=1, dtype=wide(whole)) for whole in wholes]
    flat = [index for index, (*_, part) in enumerate(parts) if part.dim() == 2]
    columns = [torch.linalg.vector_norm(wholes[index], dim=0, dtype=wide(wholes[index])) for index in flat]
    norms = fetched([*rows, *columns, *(torch.count_nonzero(each) for each in wholes)])
    counts = norms[len(rows) + len(columns) :]
    across = dict(zip(flat, norms[len(rows) : len(rows) + len(columns)], strict=True))
    alike = _alike({i: wholes[i] for i, (*_, part) in enumerate(parts) if part.dim() > 1 and _may_be_alike(norms[i])})
    found: list[dict[str, Weight]] = [{} for _ in blocks]
    for index, (block, label, group, part) in enumerate(parts):
        matrix, own = part.dim() > 1, norms[index]
        with np.errstate(over="ignore", invalid="ignore"):
            size = float(np.linalg.norm(own)) / part.numel() ** 0.5
        empty = max(int((own == 0).sum()), int((across.get(index, own) == 0).sum())) * matrix
        reads = part.shape[-1] if part.dim() else 1
        zeros = 1.0 - float(counts[index]) / part.numel()
        found[block][label] = Weight(group, matrix, part.numel(), size, empty, index in alike, reads, zeros)
    return found


def _may_be_alike(rows: np.ndarray) -> bool:
    """Whether a matrix's rows, of these norms, may all be the same, going by the first, a middle and the last."""
    return len(rows) > 2 and rows[0] == rows[len(rows) // 2] == rows[-1]


def _alike(matrices: Mapping[int, Tensor]) -> set[int]:
    """Those of the matrices whose first, middle and last rows are the same."""
    same = [(m[0] == m[len(m) // 2]).all() & (m[0] == m[-1]).all() for m in matrices.values()]
    return {index for index, each in zip(matrices, fetched(same), strict=True) if each}


def matrix_sizes(weights: Mapping[str, Weight]) -> dict[str, float]:
    """Root mean square entry of a block's matrices, by group."""
    totals: dict[str, tuple[float, int]] = {}
    for weight in (each for each in weights.values() if each.matrix):
        square, entries = totals.get(weight.group, (0.0, 0))
        totals[weight.group] = square + weight.size**2 * weight.entries, entries + weight.entries
    return {group: (square / entries) ** 0.5 for group, (square, entries) in totals.items()}


def _nothing(block: Iterable[Member]) -> Norms:
    """A place for every parameter that learns: a fused matrix has three."""
    found: Norms = {}
    for member in block:
        if member.parameter.requires_grad:
            groups = ("query", "key", "value") if member.sizes else (member.group,)
            found |= {_place(member, group): [] for group in groups}
    return found


def _place(member: Member, group: str) -> tuple[str, str]:
    return group, member.label(group) if member.parameter.dim() > 1 else ""


def _add(norms: Norms, member: Member, values: Tensor) -> None:
    for group, part in member.pieces(values.detach()):
        dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else None
        norms.setdefault(_place(member, group), []).append(torch.linalg.vector_norm(part, dtype=dtype))
