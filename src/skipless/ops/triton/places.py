"""A layout as the kernels read it: locations and documents in int32, and which stretch of the other side each block of
128 queries or keys has anything to do with."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from skipless.ops.blocks import BLOCK, visited
from skipless.ops.layout import PADDING, Layout

T = TypeVar("T")


class Places(NamedTuple):
    """queries (batch, 2, T_q) and keys (batch, 2, T_k): locations, then documents. key_ranges (batch, query blocks, 2)
    and query_ranges (batch, key blocks, 2): first and one past the last index, of which the blocks in between may be
    empty."""

    queries: Tensor
    keys: Tensor
    key_ranges: Tensor
    query_ranges: Tensor


def places(layout: Layout, batch: int, causal: bool) -> Places:
    """Of a layout with one row for each row of the batch; kept in the layout's memo for the other blocks."""
    layout = layout.for_rows(batch)

    def make() -> Places:
        partial, full = visited(layout, causal)
        seen = partial | full
        keys = _ranges(seen, layout.key_locations.shape[1])
        return Places(*sides(layout, batch), keys, _ranges(seen.mT, layout.query_locations.shape[1]))

    return _kept(layout, ("triton", causal), make)


def sides(layout: Layout, batch: int) -> tuple[Tensor, Tensor]:
    """Queries and keys alone: what decoding needs, which visits every key."""
    layout = layout.for_rows(batch)

    def make() -> tuple[Tensor, Tensor]:
        queries = _side(layout.query_locations, layout.query_documents)
        return queries, _side(layout.key_locations, layout.key_documents)

    return _kept(layout, ("triton", "sides"), make)


def _kept(layout: Layout, key: tuple, make: Callable[[], T]) -> T:
    if key in layout.memo:
        return layout.memo[key]
    made = make()
    if not torch.compiler.is_compiling():
        layout.memo[key] = made
    return made


def _side(locations: Tensor, documents: Tensor | None) -> Tensor:
    documents = torch.zeros_like(locations) if documents is None else documents.clamp(min=PADDING)
    return torch.stack([locations, documents], dim=1).to(torch.int32).contiguous()


def _ranges(seen: Tensor, length: int) -> Tensor:
    """(first, one past the last) index of what each row of blocks sees; (0, 0) where it sees nothing."""
    blocks = seen.shape[-1]
    here = torch.arange(blocks, device=seen.device)
    first = torch.where(seen, here, blocks).amin(-1)
    last = torch.where(seen, here + 1, 0).amax(-1)
    first = torch.minimum(first, last)
    return torch.stack([first * BLOCK, (last * BLOCK).clamp(max=length)], dim=-1).to(torch.int32).contiguous()
