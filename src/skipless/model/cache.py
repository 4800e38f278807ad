"""Decoding with a cache of keys and values: `decode` is prefill, chunked prefill and single step alike."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from skipless.ops.layout import Layout

if TYPE_CHECKING:
    from skipless.model.transformer import Transformer


class BlockCache:
    """Keys and values of one block, (batch, kv_heads, length, head_width), in buffers that double when full."""

    def __init__(self, capacity: int = 0):
        self.length, self.capacity = 0, capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new ones and return all: views of the buffers, valid until the next call."""
        start, end = self.length, self.length + k.shape[2]
        keys, values = self._buffers(k, end)
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, those not yet filled included, whose values mean nothing but are finite."""
        if self._keys is None or self._values is None:
            raise ValueError("the cache holds nothing yet; decode a prompt first")
        for buffer in (self._keys, self._values):
            buffer[:, :, self.length :] = 0.0
        return self._keys, self._values

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was; there may be more or fewer rows than before."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows.to(self._keys.device))
            self._values = self._values.index_select(0, rows.to(self._values.device))

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        self.length = min(self.length, length)

    def _buffers(self, k: Tensor, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys, self._values
        if keys is not None and values is not None:
            if (keys.shape[0], keys.dtype, keys.device) != (k.shape[0], k.dtype, k.device):
                raise ValueError(
                    f"the cache holds {keys.shape[0]} rows of {keys.dtype} on {keys.device} and was given {k.shape[0]} "
                    f"of {k.dtype} on {k.device}; use one KVCache per batch, or reorder() it first"
                )
            if end <= keys.shape[2]:
                return keys, values
        stored = max(end, self.capacity, 2 * self.length)
        grown = [k.new_empty(k.shape[0], k.shape[1], stored, k.shape[3]) for _ in range(2)]
        if keys is not None and values is not None:
            grown[0][:, :, : self.length] = keys[:, :, : self.length]
            grown[1][:, :, : self.length] = values[:, :, : self.length]
        self._keys, self._values = grown
        return grown[0], grown[1]


class KVCache(Sequence[BlockCache]):
    """One BlockCache per block, and which slots are padding. Memory: 2·depth·kv_heads·head_width numbers per token.

    capacity reserves that many slots at the first use; without it the buffers grow as needed. A cache serves one batch
    and one model; it works for every position kind and scheme, since attention asks the Layout where each slot stands.
    """

    def __init__(self, depth: int, capacity: int = 0):
        self._blocks = [BlockCache(capacity) for _ in range(depth)]
        self.mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Slots filled, padding included."""
        return self._blocks[-1].length

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> BlockCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockCache]: ...
    def __getitem__(self, index):
        return self._blocks[index]

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was: what beam search needs, or to drop finished rows."""
        for block in self._blocks:
            block.reorder(rows)
        self.mask = self.mask[rows.to(self.mask.device)] if self.mask is not None else None

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` slots, to decode from there again."""
        for block in self._blocks:
            block.truncate(length)
        self.mask = self.mask[:, :length] if self.mask is not None else None

    def mask_with(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """The mask of all slots once `tokens` have joined; None while no slot is padding."""
        if attention_mask is not None and attention_mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask is shaped {tuple(attention_mask.shape)} and the tokens {tuple(tokens.shape)}; give "
                "the mask of these tokens only: the cache remembers that of earlier ones"
            )
        if self.mask is None and (attention_mask is None or bool((attention_mask != 0).all())):
            return None
        new = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        old = new.new_ones(len(tokens), self.length) if self.mask is None else self.mask
        return torch.cat([old, new.to(old.device)], dim=1)


@torch.no_grad()
def decode(
    model: "Transformer",
    tokens: Tensor,
    cache: KVCache,
    *,
    attention_mask: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """Logits (batch, T, vocab_size) of tokens (batch, T) that follow what the cache holds; it then holds them too.

    The same logits as one forward over the whole sequence, however it is cut, beyond the training length too.
    attention_mask (batch, T) is 0 at padding, which may stand anywhere; rows then differ in length. last_only computes
    the logits of the last slot alone, (batch, 1, vocab_size).
    """
    check_decodable(model, tokens)
    if len(cache) != len(model.blocks):
        raise ValueError(
            f"the cache has {len(cache)} blocks and the model {len(model.blocks)}: KVCache({len(model.blocks)})"
        )
    mask = cache.mask_with(tokens, attention_mask)
    layout = None if mask is None else Layout.left_padded(mask, queries=tokens.shape[1])
    hidden = model.hidden(tokens, layout=layout, caches=cache, past=cache.length)
    cache.mask = mask
    return model.logits(hidden[:, -1:] if last_only else hidden)


def check_decodable(model: "Transformer", tokens: Tensor) -> None:
    """Raise the ValueError that says why these tokens cannot be decoded by this model."""
    if model.config.head != "lm":
        raise ValueError(f"the model's head is {model.config.head!r}; only head='lm' predicts the next token")
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ValueError(
            f"tokens are {tokens.dtype} shaped {tuple(tokens.shape)}; they must be integers shaped (batch, length), "
            "with at least one"
        )
