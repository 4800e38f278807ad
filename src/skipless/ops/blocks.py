"""The blocks of 128 queries × 128 keys that attention visits, found from bounds per block: no T×T mask is formed."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from skipless.ops.layout import PADDING, Layout

BLOCK = 128
_NO_DOCUMENT = 2**31 - 1


class Bounds(NamedTuple):
    """Per block (batch, blocks): the least and greatest location and document; whole: 128 entries, none padding."""

    first: Tensor
    last: Tensor
    low_document: Tensor
    high_document: Tensor
    whole: Tensor

    @classmethod
    def of(cls, locations: Tensor, documents: Tensor | None) -> "Bounds":
        """Bounds of each run of 128 entries; a last, shorter run is not whole."""
        if documents is None:
            documents = torch.zeros_like(locations)
        missing = -locations.shape[1] % BLOCK
        fill = pad(documents, (0, missing), value=PADDING).unflatten(1, (-1, BLOCK))
        where = pad(locations, (0, missing)).unflatten(1, (-1, BLOCK))
        token = fill != PADDING
        return cls(
            where.masked_fill(~token, _NO_DOCUMENT).amin(-1),
            where.masked_fill(~token, -1).amax(-1),
            fill.masked_fill(~token, _NO_DOCUMENT).amin(-1),
            fill.amax(-1),
            token.all(-1),
        )


def visited(layout: Layout, causal: bool) -> tuple[Tensor, Tensor]:
    """(partial, full), each (batch, query blocks, key blocks): blocks that need the mask, and blocks that need none.

    A block is left out only where the bounds prove it empty, so `partial` may hold blocks in which nothing is visible.
    """
    q = Bounds(*(t[:, :, None] for t in Bounds.of(layout.query_locations, layout.query_documents)))
    k = Bounds(*(t[:, None, :] for t in Bounds.of(layout.key_locations, layout.key_documents)))
    possible = (q.low_document <= k.high_document) & (k.low_document <= q.high_document)
    full = q.whole & k.whole & (q.low_document == k.high_document) & (q.high_document == k.low_document)
    if causal:
        possible = possible & (k.first <= q.last)
        full = full & (k.last <= q.first)
    return possible & ~full, full


def block_mask(layout: Layout, causal: bool) -> BlockMask:
    """FlexAttention's mask for a layout, kept in the layout's memo for the other blocks of the network."""
    key = ("flex", causal)
    if key in layout.memo:
        return layout.memo[key]
    mask = _build(layout, causal, _layout_mask(layout, causal) if layout.past is None else _after(layout.past))
    if not torch.compiler.is_compiling():
        layout.memo[key] = mask
    return mask


def causal_block_mask(queries: int, keys: int, device: torch.device) -> BlockMask:
    """FlexAttention's mask for the last `queries` of `keys` locations; cached, but built anew inside torch.compile."""
    build = _causal.__wrapped__ if torch.compiler.is_compiling() else _causal
    return build(queries, keys, device)


@lru_cache(maxsize=64)
def _causal(queries: int, keys: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # kept, and training may come after
        return block_mask(Layout.continuing(keys - queries, queries, device), causal=True)


def _after(past: int):
    def visible(b, h, query, key):
        return key <= query + past

    return visible


def _layout_mask(layout: Layout, causal: bool):
    query_locations, key_locations = layout.query_locations, layout.key_locations
    query_documents, key_documents = layout.query_documents, layout.key_documents

    def in_order(b, h, query, key):
        return key_locations[b, key] <= query_locations[b, query] if causal else key >= 0

    if query_documents is None or key_documents is None:
        return in_order

    def visible(b, h, query, key):
        document = query_documents[b, query]
        return in_order(b, h, query, key) & (document == key_documents[b, key]) & (document != PADDING)

    return visible


def _build(layout: Layout, causal: bool, mask_mod) -> BlockMask:
    partial, full = visited(layout, causal)
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(layout.query_locations.shape[1], layout.key_locations.shape[1]),
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(number, indices) of chosen key blocks per query block, with an axis for heads: FlexAttention's form."""
    chosen = chosen[:, None].to(torch.int32)
    indices = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.to(torch.int32)
