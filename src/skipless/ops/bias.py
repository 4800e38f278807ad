"""What attention computes from: BiasVectors, an AttentionShape as tensors, and AttentionInputs, one checked call."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skipless.ops.layout import Layout
from skipless.ops.modes import is_readable
from skipless.theory import shapes
from skipless.theory.shapes import AlibiShape, AttentionShape, IdentityShape, PlainShape, ShapeByHead

_VECTORS = ("column", "diagonal", "row_scale")
_TENSORS = ("slope", *_VECTORS, "row", "table")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class BiasVectors:
    """What attention reads of an AttentionShape A = D·softmax(B): the torch counterpart of theory's CompactBias.

        B_ij = logaddexp(column_j − slope·|i−j|, row_i)  (i ≠ j),     B_ii = diagonal_i,     D_i = row_scale_i,

    up to a constant per row. slope is a number or one per query head. The last entry of a vector stands for every later
    location. row is None where the shape has no row term.
    A shape with no O(T) form has a table instead: B itself, (T, T), with −∞ where attention is 0.
    A shape by head has all this for each run of heads that have one shape: runs says how many heads each has, and every
    tensor has one more axis in front, of so many entries.

    `of` writes every vector out to `length` entries, so that all blocks of a network have tensors of one size and share
    a compiled graph.

    reach is how many locations the vectors are right for, None for any number. Where exact_reach is set the shape
    depends on the length, and is right for sequences of `reach` locations only. plain says that B is 0 and D is 1,
    sloped_rows that there are both a slope and a row term.

    The tensors are float32 or float64 whatever the dtype of q: in bfloat16 they would move B by up to 6e-2.
    """

    slope: Tensor
    column: Tensor
    diagonal: Tensor
    row_scale: Tensor
    row: Tensor | None = None
    table: Tensor | None = None
    causal: bool = True
    reach: int | None = None
    exact_reach: bool = False
    plain: bool = False
    sloped_rows: bool = False
    runs: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "BiasVectors":
        """The vectors of `shape` for sequences up to `length` (exactly `length` for a non-causal SPA shape)."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype is {dtype}; the vectors of a shape are in torch.float32 or torch.float64")
        if isinstance(shape, IdentityShape):
            raise ValueError(
                "IdentityShape has no finite bias, so no softmax attends by it; Value-SkipInit realises it by gains, "
                "αV + β·attention with α=1, β=0, where the attention inside has PlainShape"
            )
        if isinstance(shape, ShapeByHead):
            return cls._of_runs(shape, length, device, dtype)
        if shape.tabled:
            return cls._of_table(shape, length, device, dtype)
        compact = shape.compact(length)
        here = np.arange(length)
        vectors = {n: _tensor(shapes.take(getattr(compact, n), here), device, dtype) for n in _VECTORS}
        any_length = isinstance(shape, PlainShape | AlibiShape)
        return cls(
            slope=_tensor(compact.slope, device, dtype),
            **vectors,
            row=None if compact.row is None else _tensor(shapes.take(compact.row, here), device, dtype),
            causal=shape.causal,
            reach=None if any_length else length,
            exact_reach=not (any_length or shape.causal),
            plain=isinstance(shape, PlainShape),
            sloped_rows=compact.row is not None and bool(np.any(compact.slope)),
            runs=(),
        )

    @classmethod
    def _of_table(cls, shape: AttentionShape, length: int, device, dtype: torch.dtype) -> "BiasVectors":
        zero = torch.zeros(1, device=device, dtype=dtype)
        scale, table = shape.row_scale(length), shape.bias(length)
        if table.shape != (length, length):
            raise ValueError(
                f"{type(shape).__name__} has a table of {table.shape} for {length} locations; it must be ({length}, "
                f"{length}), one for all heads. Slopes by head have a compact form: see CompactBias; tables by head "
                "are a ShapeByHead"
            )
        return cls(
            slope=zero[0],
            column=zero,
            diagonal=zero,
            row_scale=_tensor(scale, device, dtype),
            table=_tensor(table, device, dtype),
            causal=shape.causal,
            reach=length,
            exact_reach=not shape.causal,
        )

    @classmethod
    def _of_runs(cls, shape: ShapeByHead, length: int, device, dtype: torch.dtype) -> "BiasVectors":
        runs = shape.runs()
        each = [cls.of(one, length, device, dtype) for one, _ in runs]
        if len({tuple(bias.tensors()) for bias in each}) > 1:
            raise ValueError("some heads have a row term and others none; give all of them one, or none")
        stacked = {name: torch.stack([bias.tensors()[name] for bias in each]) for name in each[0].tensors()}
        return replace(each[0], **stacked, runs=tuple(count for _, count in runs))

    def by_run(self) -> "Iterator[tuple[slice, BiasVectors]]":
        """The heads of each run and their vectors, first to last."""
        start = 0
        for index, count in enumerate(self.runs):
            own = {name: tensor[index] for name, tensor in self.tensors().items()}
            yield slice(start, start + count), replace(self, **own, runs=())
            start += count

    @property
    def dtype(self) -> torch.dtype:
        return self.column.dtype

    @property
    def device(self) -> torch.device:
        return self.column.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, those that are None left out."""
        return {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "BiasVectors":
        """The vectors on another device or, for float32 and float64, in another dtype."""
        return replace(self, **{name: t.to(device=device, dtype=dtype) for name, t in self.tensors().items()})

    def for_kernels(self, gain: Tensor | None = None) -> "KernelBias":
        """What the GPU kernels read, in the order of their operators' arguments; a shape with a table has none."""
        slope, column, diagonal, row_scale = (
            t.contiguous() for t in (self.slope, self.column, self.diagonal, self.row_scale)
        )
        return KernelBias(slope, column, diagonal, row_scale, self.row, None if gain is None else gain.contiguous())

    def between(self, query_locations: Tensor, key_locations: Tensor) -> tuple[Tensor, Tensor]:
        """(bias, row_scale) between locations (…, T_q) and (…, T_k), by the definition: (…, 1 or heads, T_q, T_k) and
        (…, 1 or heads, T_q, 1). Nothing is masked."""
        if self.runs:
            each = [run.between(query_locations, key_locations) for _, run in self.by_run()]
            counts = torch.tensor(self.runs, device=self.device)
            bias, row_scale = (torch.cat(parts, dim=-3) for parts in zip(*each, strict=True))
            return bias.repeat_interleave(counts, dim=-3), row_scale.repeat_interleave(counts, dim=-3)
        row_scale = take(self.row_scale, query_locations)[..., None, :, None]
        if self.table is not None:
            return self.table[query_locations[..., :, None], key_locations[..., None, :]].unsqueeze(-3), row_scale
        distance = (query_locations[..., :, None] - key_locations[..., None, :]).abs().unsqueeze(-3)
        bias = take(self.column, key_locations)[..., None, None, :] - self.slope.reshape(-1, 1, 1) * distance
        if self.row is not None:
            bias = torch.logaddexp(bias, take(self.row, query_locations)[..., None, :, None])
        own = take(self.diagonal, query_locations)[..., None, :, None]
        return torch.where(distance == 0, own, bias), row_scale


class KernelBias(NamedTuple):
    """BiasVectors for the GPU kernels, which read these names: see the head of ops/gpu/attention.py.

    gain multiplies B: None, one number or one per query head; not where there is a row term.
    """

    slope: Tensor
    column: Tensor
    diagonal: Tensor
    row_scale: Tensor
    row: Tensor | None = None
    gain: Tensor | None = None


def take(vector: Tensor, locations: Tensor) -> Tensor:
    """vector[locations], the last entry standing for all beyond it."""
    return vector[locations.clamp(max=vector.shape[0] - 1)]


def span(vector: Tensor, start: int, count: int) -> Tensor:
    """take(vector, start … start+count−1): a view where the vector is long enough."""
    if start + count <= vector.shape[0]:
        return vector[start : start + count]
    return take(vector, torch.arange(start, start + count, device=vector.device))


def _tensor(array: np.ndarray, device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(array, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """One call of shaped_attention as every implementation receives it, after `check`.

    q, k, v are (batch, heads, length, head_width). bias_gain is None, a 0-d tensor or one number per query head.
    decoding says that the queries are the last of the keys' locations, where there are fewer of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: BiasVectors
    layout: Layout | None = None
    bias_gain: Tensor | None = None
    score_bias: Tensor | None = None
    decoding: bool = False

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of scores, bias and softmax: float32 for half-precision q, else q's own."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        tensors = (self.q, self.k, self.v, self.bias_gain, self.score_bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @property
    def in_order(self) -> bool:
        """Whether keys stand at 0 … T_k−1 and queries at the last T_q of them: no layout, or one that says as much."""
        return self.layout is None or self.layout.past is not None

    def by_run(self) -> "list[AttentionInputs]":
        """One call for each run of heads that have one shape."""
        k, v = (t.repeat_interleave(self.groups, dim=1) if self.groups > 1 else t for t in (self.k, self.v))
        gain, scores, calls = self.bias_gain, self.score_bias, []
        for heads, bias in self.bias.by_run():
            own = {"q": self.q[:, heads], "k": k[:, heads], "v": v[:, heads], "bias": bias}
            if gain is not None and gain.numel() > 1:
                own["bias_gain"] = gain[heads]
            if scores is not None and scores.dim() > 2 and scores.shape[-3] > 1:
                own["score_bias"] = scores[..., heads, :, :]
            calls.append(replace(self, **own))
        return calls

    def effective_layout(self) -> Layout:
        """The layout, or what None means: keys at 0 … T_k−1, queries at the last T_q of them."""
        if self.layout is not None:
            return self.layout
        queries, keys = self.q.shape[2], self.k.shape[2]
        return Layout.continuing(keys - queries, queries, self.q.device)

    def check(self) -> "AttentionInputs":
        """Itself, or the ValueError that says what is wrong. More queries than keys get a layout."""
        _check_tensors(self.q, self.k, self.v)
        _check_bias(self)
        if self.layout is not None:
            _check_layout(self, self.layout)
        else:
            _check_lengths(self.q.shape[2], self.k.shape[2], self.bias, self.decoding)
        _check_terms(self)
        queries, keys = self.q.shape[2], self.k.shape[2]
        if self.layout is None and queries > keys:  # of another sequence: where they stand is all one
            here = torch.arange(keys, device=self.q.device)[None]
            return replace(self, layout=Layout(here.new_zeros(1, queries), here))
        return self


def check_kinds(q: Any, k: Any, v: Any, shape: Any, bias_gain: Any, score_bias: Any) -> None:
    """Refuse arguments of other types than `shaped_attention` takes, and keys without a length."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("score_bias", score_bias)):
        if not (isinstance(tensor, Tensor) or (name == "score_bias" and tensor is None)):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if k.dim() < 2:
        raise ValueError(f"k is shaped {tuple(k.shape)}; it must be (batch, heads, length, head_width)")
    if not isinstance(shape, AttentionShape | BiasVectors):
        raise ValueError(f"shape is a {type(shape).__name__}; it must be an AttentionShape, such as PlainShape()")
    if not isinstance(bias_gain, Tensor | int | float | None):
        raise ValueError(f"bias_gain is a {type(bias_gain).__name__}; it must be a number, or a tensor of one per head")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    seen = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"got {seen}; all three must be (batch, heads, length, head_width)")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"got {seen}; k and v must have one shape, and share batch and head_width with q")
    if any(size < 1 for size in (*q.shape, *k.shape)):
        raise ValueError(f"got {seen}; no dimension may be empty")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}; query heads must be a multiple of key heads: "
            f"use {q.shape[1] // k.shape[1] * k.shape[1] or k.shape[1]} query heads"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype first")
    if q.dtype not in _DTYPES:
        raise ValueError(
            f"q is {q.dtype}; attention runs in {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; move them to one device")


def _check_bias(inputs: AttentionInputs) -> None:
    bias, q = inputs.bias, inputs.q
    if bias.device != q.device:
        raise ValueError(
            f"the shape's vectors are on {bias.device} and q on {q.device}; use BiasVectors.to({str(q.device)!r})"
        )
    for name, tensor in bias.tensors().items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} of the shape is {tensor.dtype}, which moves the bias by up to 6e-2; keep it in float32"
            )
    if bias.runs and sum(bias.runs) != q.shape[1]:
        raise ValueError(f"the shape is by head, of {sum(bias.runs)}, and q has {q.shape[1]} heads; give one for each")
    if not bias.runs and bias.slope.numel() not in (1, q.shape[1]):
        raise ValueError(
            f"the shape has {bias.slope.numel()} slopes and q {q.shape[1]} heads; build it with heads={q.shape[1]}"
        )
    _check_reach(inputs)


def _check_reach(inputs: AttentionInputs) -> None:
    bias, keys = inputs.bias, inputs.k.shape[2]
    if bias.reach is None:
        return
    if bias.exact_reach and not inputs.in_order:
        raise ValueError(
            "there is a layout, and this non-causal shape depends on the length: it knows no padding and no documents. "
            "Put rows of one length together without a layout, or use a causal shape or PlainShape(causal=False)"
        )
    queries = inputs.q.shape[2]
    if bias.exact_reach and not queries == keys == bias.reach:
        other = "attention to another sequence takes PlainShape(causal=False)"
        raise ValueError(
            f"{queries} queries and {keys} keys with no layout, but this non-causal shape depends on the length: it is "
            f"right for whole sequences of {bias.reach}; {f'build it with length={keys}' if queries == keys else other}"
        )
    needed = keys if inputs.layout is None or inputs.layout.extent is None else inputs.layout.extent
    if needed > bias.reach:
        raise ValueError(
            f"locations reach {needed}, but the shape's vectors were built for {bias.reach}; "
            f"use BiasVectors.of(shape, {needed})"
        )


def _check_lengths(queries: int, keys: int, bias: BiasVectors, decoding: bool) -> None:
    """Without a layout queries and keys are one sequence, or the queries are said to be the last of the keys.

    Plain attention without a mask looks at all keys alike, so they may be another sequence.
    """
    if queries == keys or (bias.plain and not bias.causal):
        return
    seen = f"there are {queries} queries and {keys} keys"
    other = "Attention to another sequence has no order: use PlainShape(causal=False)"
    if queries > keys:
        raise ValueError(
            f"{seen}; without a layout the queries are the last of the keys' locations: give at most {keys} queries, "
            f"or a Layout. {other}"
        )
    if not decoding:
        past, why = keys - queries, "is causal" if bias.causal else "weighs distance"
        raise ValueError(
            f"{seen}, and the shape {why}: where do the queries stand? If they follow {past} keys of a cache, say "
            f"decoding=True or layout=Layout.continuing({past}, {queries}). {other}"
        )


def _check_layout(inputs: AttentionInputs, layout: Layout) -> None:
    for side, locations, tensor in (
        ("query", layout.query_locations, inputs.q),
        ("key", layout.key_locations, inputs.k),
    ):
        batch, length = tensor.shape[0], tensor.shape[2]
        if locations.shape[0] not in (1, batch) or locations.shape[1] != length:
            raise ValueError(
                f"the layout's {side}_locations are shaped {tuple(locations.shape)}; with {side} tensors "
                f"{tuple(tensor.shape)} they must be ({batch}, {length}) or (1, {length})"
            )
        if locations.device != tensor.device:
            raise ValueError(
                f"the layout is on {locations.device} and q on {tensor.device}; build it on {tensor.device}"
            )


def _check_terms(inputs: AttentionInputs) -> None:
    gain, bias, heads = inputs.bias_gain, inputs.score_bias, inputs.q.shape[1]
    looks = is_readable(inputs.q)
    if gain is not None and gain.shape not in ((), (1,), (heads,)):
        raise ValueError(f"bias_gain is shaped {tuple(gain.shape)}; use one number, or one per head: ({heads},)")
    if gain is not None and looks and not bool(gain.isfinite().all()):
        raise ValueError(f"bias_gain is {gain.tolist()}; it must be finite (1 is the shape as it is)")
    if bias is None:
        return
    if looks and not bool(bias.amax(dim=-1).isfinite().all()):
        raise ValueError(
            "score_bias has NaN or +∞, or −∞ in a whole row: every query needs a key that it may look at; leave rows "
            "without one out by a Layout"
        )
    full = (inputs.q.shape[0], heads, inputs.q.shape[2], inputs.k.shape[2])
    if bias.dim() > 4 or any(have not in (1, want) for have, want in zip(bias.shape[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"score_bias is shaped {tuple(bias.shape)}; it must broadcast to (batch, heads, T_q, T_k) = {full}"
        )
