"""What transformers hands a model, in the native model's terms: masks, positions and caches."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from skipless.ops.layout import Layout


class HFLayerCache:
    """One block's view of a transformers Cache: the native LayerCache."""

    def __init__(self, cache: Cache, index: int, slots: int):
        self.cache, self.index, self.slots = cache, index, slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.update(k, v, self.index)
        if keys.shape[2] != self.slots:
            raise ValueError(
                f"{type(self.cache).__name__} returned {keys.shape[2]} slots where {self.slots} are filled; caches "
                "of a fixed size or a sliding window do not serve skipless models: use DynamicCache, the default"
            )
        return keys, values


def layout_of(tokens: Tensor, attention_mask: Tensor | None, past: int) -> Layout | None:
    """Where the tokens stand, or None where the mask hides nothing."""
    if attention_mask is None:
        return None
    slots = past + tokens.shape[1]
    if attention_mask.dim() != 2 or attention_mask.shape[1] != slots:
        raise ValueError(
            f"attention_mask is shaped {tuple(attention_mask.shape)}; with {past} cached slots and {tokens.shape[1]} "
            f"new tokens it must be ({tokens.shape[0]}, {slots}), 1 where there is a token"
        )
    if bool((attention_mask != 0).all()):
        return None
    return Layout.left_padded(attention_mask.to(tokens.device), queries=tokens.shape[1])


def check_position_ids(position_ids: Tensor, tokens: Tensor, layout: Layout | None, past: int) -> None:
    """Raise unless they count the tokens of each row from 0: shapes are tied to absolute locations, so no others mean
    anything. At padding they may be what they like."""
    if layout is None:
        expected = torch.arange(past, past + tokens.shape[1], device=position_ids.device)[None]
        wrong = position_ids != expected
    else:
        expected = layout.query_locations.to(position_ids.device)
        documents = layout.query_documents
        real = True if documents is None else (documents >= 0).to(position_ids.device)
        wrong = (position_ids != expected) & real
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        seen, location = (int(t.expand_as(wrong)[row, column]) for t in (position_ids, expected))
        raise ValueError(
            f"position_ids[{row}, {column}] is {seen}, but by attention_mask and "
            f"cache that token stands at {location}; leave position_ids out (several documents in a row need a Layout: "
            "call the native model)"
        )
