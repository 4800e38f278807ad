"""What transformers hands a model (attention masks, position ids, caches) as the native network's Layout and caches.

Values are looked at outside torch.compile and torch.export alone: what is traced may not depend on them.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, StaticLayer

from skipless.ops.layout import PADDING, Layout, check_mask


class HFLayerCache:
    """One block's view of a transformers Cache: the native LayerCache. `held` is what it returned last."""

    def __init__(self, cache: Cache, index: int, slots: int):
        self.cache, self.index, self.slots = cache, index, slots
        self.held: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if k.shape[1] != v.shape[1] and any(isinstance(layer, StaticLayer) for layer in self.cache.layers):
            k = k.repeat_interleave(v.shape[1] // k.shape[1], dim=1)  # which have one number of heads for both
        keys, values = self.cache.update(k, v, self.index)
        self.held = keys[:, :, : self.slots], values[:, :, : self.slots]  # those of a fixed size have more
        return self.held


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the tokens of one call stand: the native model's layout, its caches and `past`."""

    layout: Layout | None = None
    caches: list[HFLayerCache] | None = None
    past: int = 0

    @classmethod
    def of(
        cls,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        depth: int,
    ) -> "Placement":
        """The placement of x (batch, T) or (batch, T, width), behind what the cache holds."""
        if cache is not None and any(cache.is_sliding):
            raise ValueError(
                f"this {type(cache).__name__} keeps a sliding window, and a skipless network attends to all that came "
                "before: use DynamicCache(), the default, or StaticCache(config=model.config, max_cache_len=…)"
            )
        if x.dim() < 2:
            raise ValueError(
                f"input_ids are shaped {tuple(x.shape)}; they must be (batch, T): input_ids[None] for one row"
            )
        batch, new = x.shape[0], x.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        if slots := fixed_size(cache):
            past = torch.as_tensor(past, device=x.device)
            layout = _in_fixed_slots(attention_mask, past, new, slots)
        else:
            slots = past + new
            layout = _by_mask(attention_mask, (batch, new, slots), x.device)
            if position_ids is not None:
                layout = _by_position_ids(position_ids.to(x.device), layout, past, new)
        caches = None if cache is None else [HFLayerCache(cache, index, slots) for index in range(depth)]
        return cls(layout, caches, 0 if isinstance(past, Tensor) else past)


def fixed_size(cache: Cache | None) -> int:
    """The slots of a cache that has all of them from the start and counts those filled on the device; else 0."""
    if cache is None or not cache.is_compileable:
        return 0
    return cast(StaticLayer, cache.layers[0]).max_cache_len


def _by_mask(mask: Tensor | None, sizes: tuple[int, int, int], device: torch.device) -> Layout | None:
    """The layout of a mask (batch, slots) or (batch, 1, T, slots); None where it hides nothing."""
    if mask is None:
        return None
    batch, new, slots = sizes
    if mask.dim() == 4:
        return _by_square_mask(mask.to(device), new, slots)
    if mask.dim() != 2 or mask.shape[1] != slots:
        raise ValueError(
            f"attention_mask is shaped {tuple(mask.shape)}; with {slots - new} cached slots and {new} new tokens it "
            f"must be ({batch}, {slots}), 1 where there is a token"
        )
    check_mask(mask)
    if not torch.compiler.is_compiling() and bool((mask != 0).all()):
        return None
    return Layout.left_padded(mask.to(device), queries=new)


def _by_square_mask(mask: Tensor, new: int, slots: int) -> Layout:
    """The layout that a dense mask means, if it means one.

    Locations count what a query sees; queries that see the same first key are of one document.
    """
    seen = _seen(mask)[:, 0, :, :slots]
    if seen.shape[1:] != (new, slots) or mask.shape[1] != 1:
        raise ValueError(
            f"attention_mask is shaped {tuple(mask.shape)}; of four dimensions it must be (batch, 1, {new}, {slots})"
        )
    if new == slots:
        locations = (seen.sum(dim=-1) - 1).clamp(min=0)
        documents = torch.where(seen.any(dim=-1), seen.to(torch.int8).argmax(dim=-1), PADDING)
        layout = Layout(locations, locations, documents, documents)
    else:
        layout = Layout.left_padded(seen.any(dim=1), queries=new)
    possible = layout.visible(causal=True).tril(slots - new)
    if not torch.compiler.is_compiling() and not bool((possible == seen).all()):
        raise ValueError(
            "attention_mask of four dimensions is not causal attention within documents, with padding: only then do "
            "tokens have locations, on which this network's attention depends. Give a mask (batch, slots)"
        )
    return layout


def _seen(mask: Tensor) -> Tensor:
    """A dense mask as booleans: numbers that are added to scores are 0 where a query sees a key, integers are 1."""
    return mask > -1.0 if mask.is_floating_point() else mask != 0


def _by_position_ids(position_ids: Tensor, layout: Layout | None, past: int, new: int) -> Layout | None:
    """The layout, with which position_ids must agree: shapes are tied to absolute locations, so others mean nothing.

    Without a mask or a cache they may start again at 0, where the next document of a packed row begins. At padding they
    may be what they like.
    """
    packs = layout is None and past == 0
    if torch.compiler.is_compiling():
        return _packed(position_ids) if packs else layout
    if layout is None:
        expected, real = torch.arange(past, past + new, device=position_ids.device)[None], torch.tensor(True)
    else:
        expected, documents = layout.query_locations, layout.query_documents
        real = torch.tensor(True) if documents is None else documents != PADDING
    wrong = (position_ids != expected) & real.to(position_ids.device)
    if not bool(wrong.any()):
        return layout
    steps = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if packs and bool((steps | (position_ids[:, 1:] == 0)).all()) and bool((position_ids[:, 0] == 0).all()):
        return _packed(position_ids)
    row, column = wrong.nonzero()[0].tolist()
    seen, location = (int(t.expand_as(wrong)[row, column]) for t in (position_ids, expected))
    raise ValueError(
        f"position_ids[{row}, {column}] is {seen}, but by attention_mask and cache that token stands at {location}; "
        "leave position_ids out. Without a mask or a cache they may start again at 0, once for each document of a row"
    )


def _packed(position_ids: Tensor) -> Layout:
    documents = (position_ids == 0).cumsum(dim=1)
    return Layout(position_ids, position_ids, documents, documents)


def _in_fixed_slots(mask: Tensor | None, past: Tensor, new: int, slots: int) -> Layout:
    """The layout over all slots of a cache, of which `past`, a number on the device, are filled; others are unseen."""
    here, keys = past + torch.arange(new, device=past.device), torch.arange(slots, device=past.device)
    if mask is None:
        return Layout(here[None], keys[None])
    if mask.dim() == 4:
        mask = _seen(mask)[:, 0].any(dim=1)
    token = filled_up(mask.to(past.device) != 0, slots) & (keys < past + new)
    locations, documents = (token.cumsum(dim=1) - 1).clamp(min=0), torch.where(token, 0, PADDING)
    return Layout(locations.index_select(1, here), locations, documents.index_select(1, here), documents)


def filled_up(mask: Tensor, slots: int) -> Tensor:
    """A mask (batch, some slots) as one of all slots of a cache, so that it keeps one shape while tokens come."""
    return pad(mask, (0, slots - mask.shape[1]))
