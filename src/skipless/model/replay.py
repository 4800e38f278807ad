"""Decoding by replaying one step: its shapes are fixed and its position is a tensor, so it can be one CUDA graph."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skipless.model.cache import KVCache
from skipless.model.recording import CudaRecorder, Recorder
from skipless.ops.layout import PADDING, Layout

if TYPE_CHECKING:
    from skipless.model.transformer import Transformer

_WARM_UP = 2
# recording runs three steps: fewer tokens are not worth it
_FEWEST_TOKENS = 8


def replays(model: "Transformer", tokens: Tensor, new_tokens: int) -> bool:
    """Whether `stream` decodes by a graph: on one GPU, where launching the kernels of a step takes longer than they do.

    Relative positions read their furthest distance from the device, which cannot be recorded.
    """
    if not tokens.is_cuda or new_tokens < _FEWEST_TOKENS or model.config.position == "relative":
        return False
    return {parameter.device for parameter in model.parameters()} == {tokens.device}


class FixedBlock:
    """The keys and values of one block, all slots of them, filled at a position that is a tensor."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor):
        self.keys, self.values, self.position = keys, values, position

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token's and return all slots; the layout says which of them hold something."""
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.keys, self.values


class ReplayedStep:
    """A function from the last tokens (batch,) to the next logits (batch, vocab_size), after a prompt in `cache`.

    It fills the cache's buffers up to their capacity, but the cache does not count what they hold: it is this object's
    from now on. The logits returned are overwritten by the next call.
    """

    def __init__(self, model: "Transformer", cache: KVCache, recorder: Recorder | None = None):
        self.model, buffers = model, [block.buffers() for block in cache]
        keys = buffers[0][0]
        batch, _, self.capacity, _ = keys.shape
        self.real = torch.ones(batch, self.capacity, dtype=torch.bool, device=keys.device)
        if cache.mask is not None:
            self.real[:, : cache.length] = cache.mask
        self.locations = (self.real.cumsum(dim=1) - 1).clamp(min=0)
        self.slots = torch.arange(self.capacity, device=keys.device)
        self.position = torch.tensor([cache.length], device=keys.device)
        self.token = torch.zeros(batch, dtype=torch.long, device=keys.device)
        self.blocks = [FixedBlock(*pair, self.position) for pair in buffers]
        self.left = self.capacity - cache.length
        self._read = model.prepare(self.capacity, keys)  # the model may replace what the graph reads
        self._replay = self._record(recorder or CudaRecorder())

    @torch.no_grad()
    def _record(self, recorder: Recorder):
        start = self.position.clone()
        for _ in range(_WARM_UP):
            recorder.warm_up(self._step)
            self.position.copy_(start)  # what was stored there will be written over
        replay = recorder.capture(self._step)
        self.position.copy_(start)
        return replay

    def _step(self) -> tuple[Tensor, ...]:
        held = self.real & (self.slots <= self.position)
        here = self.locations.index_select(1, self.position)
        layout = Layout(here, self.locations, torch.zeros_like(here), torch.where(held, 0, PADDING))
        hidden = self.model.hidden(self.token[:, None], layout=layout, caches=self.blocks)
        logits = self.model.logits(hidden)[:, -1]
        self.position.add_(1)
        return (logits,)

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """The logits that follow `token`."""
        if not self.left:
            raise ValueError(f"all {self.capacity} slots of the cache are filled; give KVCache a larger capacity")
        self.left -= 1
        self.token.copy_(token)
        return self._replay()[0]
