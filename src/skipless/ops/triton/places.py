"""A layout as the kernels read it: locations and documents in int32, and which stretch of the other side each block of
128 queries or keys has anything to do with."""

from typing import NamedTuple

import torch
from torch import Tensor

from skipless.ops.blocks import BLOCK, visited
from skipless.ops.layout import PADDING, Layout


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
    key = ("triton", causal)
    if key in layout.memo:
        return layout.memo[key]
    partial, full = visited(layout, causal)
    seen = partial | full
    made = Places(
        _side(layout.query_locations, layout.query_documents),
        _side(layout.key_locations, layout.key_documents),
        _ranges(seen, layout.key_locations.shape[1]),
        _ranges(seen.mT, layout.query_locations.shape[1]),
    )
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
