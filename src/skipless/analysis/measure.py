"""Hooks that measure a network while it runs: activations as they leave each block, gradients as they come back.

One forward and one backward serve every number. Nothing but numbers is kept of a block once it is passed, and none is
read before both are over, so that a GPU is never waited for.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipless.analysis.activation_stats import ActivationStats, Described, Wanted, describe, wide
from skipless.analysis.attention_watch import AttentionWatch, of_shaped
from skipless.analysis.attention_weights import AttentionStats
from skipless.analysis.layout import batch_second, check_locations, rows_first
from skipless.analysis.stopwatch import Stopwatch
from skipless.nn.attention import ShapedAttention


class Recorder:
    """A context in which the given blocks are measured. Outside it the model has no hook of ours.

    live is for a training loop: each block's first run counts, further ones (gradient accumulation, recomputed
    activations) are let pass, and refused says why a batch cannot be measured. Otherwise that is an error, as is a
    block that runs twice, since its numbers would be of two places.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], wanted: Wanted, *, live: bool = False):
        self.blocks, self.wanted, self.live = list(blocks), wanted, live
        self.described: list[Described] = []
        self.last: Tensor | None = None
        self.watch = Stopwatch()
        self.current: int | None = None
        self.refused: str | None = None
        self._carries: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._attention: dict[int, Tensor] = {}
        self._swapped = False
        self._entered: Tensor | None = None
        self._open = ExitStack()

    def __enter__(self) -> "Recorder":
        for index, (_, block) in enumerate(self.blocks, start=1):
            before = block.register_forward_pre_hook(self._before(index), with_kwargs=True)
            after = block.register_forward_hook(self._after(index), with_kwargs=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        ours = [self._ask(block, index) for index, (_, block) in enumerate(self.blocks, 1) if self.wanted.attention]
        if not all(ours):
            self._open.enter_context(AttentionWatch(lambda: self.current, self._attention))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        self._entered, self.current = None, None

    @cached_property
    def stats(self) -> list[ActivationStats]:
        """Of what enters the first block, then of what leaves each."""
        return [each.numbers() for each in self.described]

    @property
    def carries(self) -> dict[int, float]:
        """Mean cosine of a location before and after a block, by block from 1."""
        return {index: float(value) for index, value in self._carries.items()}

    @property
    def gradients(self) -> dict[int, np.ndarray]:
        """Squared norms (rows, T) of the gradient at each block's output, 0 being the first one's input."""
        return {index: value.cpu().numpy() for index, value in self._gradients.items()}

    @property
    def real(self) -> np.ndarray:
        """False at padding, (rows, T), or one True for all."""
        keep = self.wanted.keep
        return np.array(True) if keep is None else keep.cpu().numpy()

    @property
    def attention(self) -> dict[int, AttentionStats]:
        """By block, from 1; blocks whose attention could not be seen are missing."""
        return {index: AttentionStats.of(sums) for index, sums in self._attention.items()}

    def _ask(self, block: nn.Module, index: int) -> bool:
        """Have this library's attention, if the block has it, tell of itself as it runs; whether it does."""
        own = next((module for module in block.modules() if isinstance(module, ShapedAttention)), None)
        if own is None:
            return False

        def hook(module: nn.Module, args: tuple) -> None:
            cached = any(arg is not None for arg in args[2:])
            if self.current == index and index not in self._attention and not cached:
                self._attention[index] = of_shaped(own, args[0].detach(), *args[1:2])

        self._open.callback(own.register_forward_pre_hook(hook).remove)
        return True

    def _before(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict):
            if not self._first_run(index):
                return None
            x, changed = hidden([*args, *kwargs.values()]), None
            if index == 1:
                if not x.requires_grad and not self.live and torch.is_grad_enabled():
                    lifted = x.detach().requires_grad_()  # frozen embeddings: gradients still have to reach the blocks
                    changed = _exchanged(args, kwargs, x, lifted)
                    x = lifted
                self._swapped = batch_second(x, (block for _, block in self.blocks), self.wanted.given)
                if not self._accepts(self._rows(x)):
                    return None
                self._note(0, x)
            self._entered, self.current = x.detach(), index
            return changed

        return hook

    def _after(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            if self.current != index:
                return
            x = hidden(out)
            if self._entered is not None and self._entered.shape == x.shape:
                self._carries[index] = _carry(self._entered, x)
            self.current, self._entered = None, None
            self._note(index, x)
            if index == len(self.blocks) and not self.live:
                self.last = x

        return hook

    def _first_run(self, index: int) -> bool:
        """Whether this run of a block counts; raises where it comes out of turn."""
        expected = max(len(self.described), 1)
        if index == expected and self.refused is None:
            return True
        if self.live:
            return False
        name = self.blocks[index - 1][0]
        if index < expected:
            raise ValueError(f"block {name} ran twice in one forward (shared weights?), so its signal has two depths")
        raise ValueError(f"block {name} ran before {self.blocks[expected - 1][0]}; name blocks in the order they run")

    def _accepts(self, x: Tensor) -> bool:
        rows, keep = self.wanted.rows, self.wanted.keep
        if self.live and keep is not None and keep.shape != x.shape[:2]:
            keep = None  # of something else, such as a text without the image before it
            self.wanted = replace(self.wanted, keep=None)
        try:
            check_locations(x[:rows], None if keep is None else keep[:rows])
        except ValueError as error:
            if not self.live:
                raise
            self.refused = str(error)
        return self.refused is None

    def _note(self, index: int, x: Tensor) -> None:
        """Measure activations now and their gradient when it comes."""
        wanted = self.wanted if index == 0 else replace(self.wanted, kernel=False)
        with self.watch.around(x.device):
            self.described.append(describe(self._rows(x.detach()), wanted))
        if x.requires_grad:
            x.register_hook(lambda gradient: self._arrived(index, gradient))

    def _arrived(self, index: int, gradient: Tensor) -> None:
        with self.watch.around(gradient.device):
            norms = torch.linalg.vector_norm(self._rows(gradient.detach()), dim=-1, dtype=wide(gradient)).square()
            self._gradients.setdefault(index, norms)

    def _rows(self, x: Tensor) -> Tensor:
        return rows_first(x, self._swapped)


def hidden(values: Any) -> Tensor:
    """The hidden state among a block's arguments or results: the first floating tensor of two dimensions or more."""
    if isinstance(values, Tensor):
        return values
    found = values.values() if isinstance(values, Mapping) else values
    for value in found:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
    raise ValueError(
        f"a block reads or gives {[type(value).__name__ for value in found]}, with no hidden state among it; name "
        "modules that map (batch, T, width) to the same: blocks=[…]"
    )


@torch.no_grad()
def _carry(before: Tensor, after: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean()


def _exchanged(args: tuple, kwargs: dict, old: Tensor, new: Tensor) -> tuple[tuple, dict]:
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )
