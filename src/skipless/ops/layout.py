"""Where queries and keys are: documents, padding, decoding; and which blocks of a score matrix hold anything.

BlockMask is FlexAttention's form of it, KernelLayout that of the GPU kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from skipless.ops.modes import is_readable

PADDING = -1
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Layout:
    """The location of each query and key within its document, and the document's id.

    query_locations (batch, T_q) and key_locations (batch, T_k) hold integers ≥ 0; batch may be 1, for all rows alike.
    Documents are ids ≥ 0 of the same shapes, or None for one document per row; −1 is padding, which nothing attends and
    whose own output is 0. Attention stays within a document, and under a causal shape goes to locations ≤ the query's.
    extent bounds the locations: all lie in 0 … extent−1. It is a Python number, so that checking it reads no device.
    past, set by `continuing`, says that keys stand at 0 … T_k−1 and queries at past … T_k−1 without documents: the same
    as no layout at all, but with a memo.

    SPA biases depend on absolute locations (a location 0 that stands for all before it), so packing and padding need
    this and not only a mask. Build one Layout for all blocks of a forward: block masks are remembered in `memo`.
    """

    query_locations: Tensor
    key_locations: Tensor
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    extent: int | None = None
    past: int | None = None
    memo: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if (self.query_documents is None) != (self.key_documents is None):
            given, missing = ("key", "query") if self.query_documents is None else ("query", "key")
            raise ValueError(f"{given}_documents are given without {missing}_documents: give both, or neither")
        for side in ("query", "key"):
            locations, documents = getattr(self, f"{side}_locations"), getattr(self, f"{side}_documents")
            if locations.dim() != 2 or locations.is_floating_point():
                raise ValueError(
                    f"{side}_locations are {locations.dtype} shaped {tuple(locations.shape)}; they must be integers "
                    "shaped (batch, length), with batch 1 where all rows are alike"
                )
            if documents is not None and documents.shape != locations.shape:
                raise ValueError(
                    f"{side}_documents are shaped {tuple(documents.shape)} and {side}_locations "
                    f"{tuple(locations.shape)}; they must agree"
                )
        if self.extent is None:
            object.__setattr__(self, "extent", self.key_locations.shape[1])

    @classmethod
    def continuing(cls, past: int, new: int, device: torch.device | str | None = None) -> "Layout":
        """Decoding: `new` queries after `past` cached locations, all of one document. past=0 is a whole sequence."""
        if past < 0 or new < 1:
            raise ValueError(f"past={past}, new={new}; decoding needs past ≥ 0 and new ≥ 1")
        keys = torch.arange(past + new, device=device)[None]
        return cls(keys[:, past:], keys, past=past)

    @classmethod
    def packed(cls, document_ids: Tensor) -> "Layout":
        """Several documents per row: ids (batch, T), where consecutive equal ids are one document and −1 is padding.

        Locations restart at 0 with each document, so each is attended as if it were alone in the batch. Two documents
        with the same id that do not touch stay apart.
        """
        _check_tensor("document_ids", document_ids)
        if document_ids.dim() != 2 or document_ids.is_floating_point() or document_ids.dtype == torch.bool:
            raise ValueError(
                f"document_ids are {document_ids.dtype} shaped {tuple(document_ids.shape)}; they must be integers "
                "shaped (batch, length)"
            )
        index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
        starts = torch.ones_like(document_ids, dtype=torch.bool)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        locations = index - torch.where(starts, index, 0).cummax(dim=1).values
        runs = (starts.cumsum(dim=1) - 1).masked_fill(document_ids == PADDING, PADDING)
        return cls(locations, locations, runs, runs)

    @classmethod
    def left_padded(cls, attention_mask: Tensor, queries: int | None = None) -> "Layout":
        """One document per row, some slots padding: attention_mask (batch, T_k) is 1 or True where there is a token.

        Locations count the tokens, so padding on the right or in between is as good. With `queries`, the queries are
        the last so many slots and the rest is cache: decoding.
        """
        _check_tensor("attention_mask", attention_mask)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask is shaped {tuple(attention_mask.shape)}; it must be (batch, T_k), 1 where there is "
                "a token (a T×T mask is the shape's own business)"
            )
        check_mask(attention_mask)
        slots = attention_mask.shape[1]
        queries = slots if queries is None else queries
        if not 1 <= queries <= slots:
            raise ValueError(f"queries={queries} of {slots} slots: use a number from 1 to {slots}")
        token = attention_mask != 0
        locations = (token.cumsum(dim=1) - 1).clamp(min=0)
        documents = torch.where(token, 0, PADDING)
        return cls(locations[:, slots - queries :], locations, documents[:, slots - queries :], documents)

    def to(self, device: torch.device | str | int) -> "Layout":
        """The layout on another device: itself if it is there already, else one copy per device for all blocks."""
        if self.key_locations.to(device) is self.key_locations:
            return self
        return self._changed(("to", str(device)), lambda tensor: tensor.to(device))

    def for_rows(self, batch: int) -> "Layout":
        """The layout with a row for each of `batch` rows, where batch 1 stood for all: what GPU kernels index."""
        if self.past is not None or self.query_locations.shape[0] == self.key_locations.shape[0] == batch:
            return self
        return self._changed(("rows", batch), lambda tensor: tensor.expand(batch, -1).contiguous())

    def _changed(self, key: tuple, change: Callable[[Tensor], Tensor]) -> "Layout":
        queries, keys = self.query_documents, self.key_documents

        def make() -> Layout:
            return Layout(
                change(self.query_locations),
                change(self.key_locations),
                None if queries is None else change(queries),
                None if keys is None else change(keys),
                self.extent,
                self.past,
            )

        return self.remember(key, make)

    def remember(self, key: tuple, make: Callable[[], T]) -> T:
        """What `make` makes of this layout, once for all blocks of a network; inside torch.compile it is not stored."""
        if key in self.memo:
            return self.memo[key]
        made = make()
        if not torch.compiler.is_compiling():
            self.memo[key] = made
        return made

    def visible(self, causal: bool) -> Tensor:
        """Which keys each query may attend, (batch or 1, T_q, T_k): the definition, dense."""
        queries, keys = self.query_locations[:, :, None], self.key_locations[:, None, :]
        visible = keys <= queries if causal else torch.ones_like(keys <= queries)
        if self.query_documents is None or self.key_documents is None:
            return visible
        same = self.query_documents[:, :, None] == self.key_documents[:, None, :]
        return visible & same & (self.query_documents != PADDING)[:, :, None]


def check_mask(mask: Tensor) -> None:
    """Refuse a mask of other numbers than 0 and 1, such as one that is added to scores. A GPU is not waited for."""
    if is_readable(mask) and (others := mask[(mask != 0) & (mask != 1)]).numel():
        raise ValueError(
            f"attention_mask holds {others[0].item():g}; it must be 1 where there is a token, and 0 elsewhere: "
            "(mask == 0) of one that is added to scores; for documents use Layout.packed(document_ids)"
        )


def _check_tensor(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor, such as torch.tensor([…])")


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
    """FlexAttention's mask for a layout, remembered in the layout for the other blocks of the network."""

    def make() -> BlockMask:
        partial, full = visited(layout, causal)
        return BlockMask.from_kv_blocks(
            *_ordered(partial),
            *_ordered(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=_layout_mask(layout, causal) if layout.past is None else _after(layout.past),
            seq_lengths=(layout.query_locations.shape[1], layout.key_locations.shape[1]),
        )

    return layout.remember(("flex", causal), make)


def causal_block_mask(queries: int, keys: int, device: torch.device) -> BlockMask:
    """FlexAttention's mask for the last `queries` of `keys` locations; cached, but built anew inside torch.compile."""
    build = _causal.__wrapped__ if torch.compiler.is_compiling() else _causal
    return build(queries, keys, device)


@lru_cache(maxsize=64)
def _causal(queries: int, keys: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # it stays in the cache, and training may come after
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


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(number, indices) of chosen key blocks per query block, with an axis for heads: FlexAttention's form."""
    chosen = chosen[:, None].to(torch.int32)
    indices = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.to(torch.int32)


class KernelLayout(NamedTuple):
    """A layout for the GPU kernels, in int32.

    queries (batch, 2, T_q) and keys (batch, 2, T_k): locations, then documents. key_ranges (batch, query blocks, 2) and
    query_ranges (batch, key blocks, 2): the first index that a block sees and one past the last; blocks in between may
    be empty.
    """

    queries: Tensor
    keys: Tensor
    key_ranges: Tensor
    query_ranges: Tensor


def kernel_layout(layout: Layout, batch: int, causal: bool) -> KernelLayout:
    """The GPU kernels' form of a layout, remembered in the layout for the other blocks."""
    layout = layout.for_rows(batch)

    def make() -> KernelLayout:
        partial, full = visited(layout, causal)
        seen = partial | full
        keys = _ranges(seen, layout.key_locations.shape[1])
        return KernelLayout(*kernel_sides(layout, batch), keys, _ranges(seen.mT, layout.query_locations.shape[1]))

    return layout.remember(("triton", causal), make)


def kernel_sides(layout: Layout, batch: int) -> tuple[Tensor, Tensor]:
    """queries and keys of kernel_layout alone: what decoding needs, which visits every key."""
    layout = layout.for_rows(batch)

    def make() -> tuple[Tensor, Tensor]:
        queries = _side(layout.query_locations, layout.query_documents)
        return queries, _side(layout.key_locations, layout.key_documents)

    return layout.remember(("triton", "sides"), make)


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
