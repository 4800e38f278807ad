"""BiasVectors: the scalars and O(T) vectors of an AttentionShape as tensors, ready for an attention kernel."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from skipless.theory import shapes
from skipless.theory.shapes import (
    AlibiShape,
    AttentionShape,
    DenseShape,
    IdentityShape,
    PlainShape,
    RescaledShape,
    SymmetricExponentialShape,
)

_VECTORS = ("column", "diagonal", "row_scale")
_TENSORS = ("slope", *_VECTORS, "row", "table")


@dataclass(frozen=True, eq=False)
class BiasVectors:
    """What a kernel reads of an AttentionShape A = D·softmax(B): the torch counterpart of theory's CompactBias.

        B_ij = logaddexp(column_j − slope·|i−j|, row_i)  (i ≠ j),     B_ii = diagonal_i,     D_i = row_scale_i,

    up to a constant per row. slope is a number or one per query head. The last entry of a vector stands for every later
    location. row is None where the shape has no row term.
    A shape with no O(T) form has a table instead: B itself, (T, T), with −∞ where attention is 0.

    `of` writes every vector out to `length` entries, so that all blocks of a network have tensors of one size and share
    a compiled graph.

    reach is how many locations the parts are right for, None for any number; where exact_reach is set the shape depends
    on the length, and serves sequences of `reach` locations only. plain says that B is 0 and D is 1 everywhere.

    The tensors are float32 or float64 whatever the dtype of q: in bfloat16 they would move B by up to 6e-2. A module
    that registers them as buffers must keep `.to(bfloat16)` away from them, and rebuilds the parts by `with_tensors`.
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

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "BiasVectors":
        """The parts of `shape` for sequences up to `length` (exactly `length` for a non-causal SPA shape)."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype is {dtype}; the parts of a shape are kept in torch.float32 or torch.float64")
        if isinstance(shape, IdentityShape):
            raise ValueError(
                "IdentityShape has no finite bias, so no softmax attends by it; Value-SkipInit realises it by gains, "
                "αV + β·attention with α=1, β=0, where the attention inside has PlainShape"
            )
        if _is_table(shape):
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
        )

    @classmethod
    def _of_table(cls, shape: AttentionShape, length: int, device, dtype: torch.dtype) -> "BiasVectors":
        zero = torch.zeros(1, device=device, dtype=dtype)
        scale, table = shape.row_scale(length), shape.bias(length)
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

    @property
    def dtype(self) -> torch.dtype:
        return self.column.dtype

    @property
    def device(self) -> torch.device:
        return self.column.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, those that are None left out: what a module registers as non-persistent buffers."""
        return {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}

    def with_tensors(self, **tensors: Tensor) -> "BiasVectors":
        """The same parts around other tensors: what a module builds from its buffers on each forward."""
        return replace(self, **tensors)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "BiasVectors":
        """The parts on another device or, for float32 and float64, in another dtype."""
        return self.with_tensors(**{name: t.to(device=device, dtype=dtype) for name, t in self.tensors().items()})

    def between(self, query_locations: Tensor, key_locations: Tensor) -> tuple[Tensor, Tensor]:
        """(bias, row_scale) between locations (…, T_q) and (…, T_k), by the definition: (…, 1 or heads, T_q, T_k) and
        (…, T_q). Nothing is masked."""
        row_scale = take(self.row_scale, query_locations)
        if self.table is not None:
            return self.table[query_locations[..., :, None], key_locations[..., None, :]].unsqueeze(-3), row_scale
        distance = (query_locations[..., :, None] - key_locations[..., None, :]).abs().unsqueeze(-3)
        bias = take(self.column, key_locations)[..., None, None, :] - self.slope.reshape(-1, 1, 1) * distance
        if self.row is not None:
            bias = torch.logaddexp(bias, take(self.row, query_locations)[..., None, :, None])
        own = take(self.diagonal, query_locations)[..., None, :, None]
        return torch.where(distance == 0, own, bias), row_scale


def take(vector: Tensor, locations: Tensor) -> Tensor:
    """vector[locations], the last entry standing for all beyond it."""
    return vector[locations.clamp(max=vector.shape[0] - 1)]


def span(vector: Tensor, start: int, count: int) -> Tensor:
    """take(vector, start … start+count−1): a view where the vector is long enough."""
    if start + count <= vector.shape[0]:
        return vector[start : start + count]
    return take(vector, torch.arange(start, start + count, device=vector.device))


def _is_table(shape: AttentionShape) -> bool:
    base = shape.base if isinstance(shape, RescaledShape) else shape
    return isinstance(base, DenseShape | SymmetricExponentialShape)


def _tensor(array: np.ndarray, device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(array, dtype=dtype, device=device)
