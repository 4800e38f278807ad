"""Hooks that measure a network while it runs: activations as they leave each block, gradients as they come back.

One forward and one backward serve every number. Nothing but numbers is kept of a block once it is passed.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipless.analysis.activation_stats import ActivationStats, Wanted, describe, wide
from skipless.analysis.attention_watch import AttentionStats, AttentionWatch
from skipless.analysis.parameter_groups import Member, members


class Recorder:
    """A context in which the given blocks are measured. Outside it the model has no hook of ours.

    live is for a training loop: each block's first run counts, further ones (gradient accumulation, recomputed
    activations) are let pass. Otherwise a block that runs twice is an error, since its numbers would be of two places.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], wanted: Wanted, *, live: bool = False):
        self.blocks, self.wanted, self.live = list(blocks), wanted, live
        self.stats: list[ActivationStats] = []
        self.carries: dict[int, float] = {}
        self.gradients: dict[int, np.ndarray] = {}
        self.last: Tensor | None = None
        self.seconds = 0.0
        self.current: int | None = None
        self.watch = AttentionWatch(lambda: self.current)
        self._swapped = any(getattr(m, "batch_first", True) is False for _, b in blocks for m in b.modules())
        self._entered: Tensor | None = None
        self._open = ExitStack()

    def __enter__(self) -> "Recorder":
        for index, (_, block) in enumerate(self.blocks, start=1):
            before = block.register_forward_pre_hook(self._before(index), with_kwargs=True)
            after = block.register_forward_hook(self._after(index), with_kwargs=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        if self.wanted.attention:
            self._open.enter_context(self.watch)
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        self._entered, self.current = None, None

    @property
    def attention(self) -> dict[int, AttentionStats]:
        """By block, from 1; blocks whose attention could not be seen are missing."""
        return self.watch.found

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
                self._check(x)
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
                self.carries[index] = _carry(self._entered, x)
            self.current, self._entered = None, None
            self._note(index, x)
            if index == len(self.blocks) and not self.live:
                self.last = x

        return hook

    def _first_run(self, index: int) -> bool:
        """Whether this run of a block counts; raises where it comes out of turn."""
        expected = max(len(self.stats), 1)
        if index == expected:
            return True
        if self.live:
            return False
        name = self.blocks[index - 1][0]
        if index < expected:
            raise ValueError(f"block {name} ran twice in one forward (shared weights?), so its signal has two depths")
        raise ValueError(f"block {name} ran before {self.blocks[expected - 1][0]}; name blocks in the order they run")

    def _check(self, x: Tensor) -> None:
        batch, length = self._rows(x).shape[:2]
        if length < 2:
            raise ValueError("the batch has 1 location per row; cosines compare locations, so give at least 2 tokens")
        keep = self.wanted.keep
        if keep is not None and keep.shape != (batch, length):
            raise ValueError(
                f"attention_mask is {tuple(keep.shape)} but the first block reads {(batch, length)} locations; "
                "leave the mask out, or give one entry per location"
            )
        if keep is not None and int(keep.sum(-1).min()) < 2:
            raise ValueError("a row of the batch has fewer than 2 tokens outside the padding; leave such rows out")

    def _note(self, index: int, x: Tensor) -> None:
        """Measure activations now and their gradient when it comes."""
        started = time.perf_counter()
        wanted = self.wanted if index == 0 else replace(self.wanted, kernel=False)
        self.stats.append(describe(self._rows(x.detach()), wanted))
        self.seconds += time.perf_counter() - started
        if x.requires_grad:
            x.register_hook(lambda gradient: self._arrived(index, gradient))

    def _arrived(self, index: int, gradient: Tensor) -> None:
        started = time.perf_counter()
        norms = torch.linalg.vector_norm(self._rows(gradient.detach()), dim=-1, dtype=wide(gradient)).square()
        if self.wanted.keep is not None:
            norms = norms.masked_fill(~self.wanted.keep.to(norms.device), torch.nan)
        self.gradients.setdefault(index, norms.cpu().numpy())
        self.seconds += time.perf_counter() - started

    def _rows(self, x: Tensor) -> Tensor:
        """(batch, T, width), whatever the model's layout."""
        if x.dim() == 2:
            return x[None]
        x = x.flatten(1, -2)
        return x.transpose(0, 1) if self._swapped else x


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


class GradientTaker:
    """A context in which every parameter's gradient is reduced to norms and dropped at once.

    Gradients that were there before are put back on leaving.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]):
        self.groups: list[dict[str, float]] = [{} for _ in blocks]
        self._blocks = [members(block) for _, block in blocks]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._kept: list[Tensor | None] = []
        self._open = ExitStack()

    def __enter__(self) -> "GradientTaker":
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters):
            raise ValueError(
                "a parameter has hooks that run when its gradient is ready (an optimizer inside the backward pass?); "
                "an inspection would set them off: inspect before they are added"
            )
        self._kept = [p.grad for p in self._parameters]
        owners = {id(m.parameter): (index, m) for index, block in enumerate(self._blocks) for m in block}
        for parameter in self._parameters:
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(self._taker(owners.get(id(parameter))))
            self._open.callback(hook.remove)
        for groups, block in zip(self.groups, self._blocks, strict=True):
            groups.update(dict.fromkeys(_groups_of(m for m in block if m.parameter.requires_grad), 0.0))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        for parameter, gradient in zip(self._parameters, self._kept, strict=True):
            parameter.grad = gradient

    def _taker(self, owner: tuple[int, Member] | None):
        def take(parameter: Tensor) -> None:
            if owner is not None and parameter.grad is not None:
                _add(self.groups[owner[0]], owner[1], parameter.grad)
            parameter.grad = None

        return take


def gradient_norms(blocks: Sequence[tuple[str, nn.Module]]) -> list[dict[str, float]]:
    """Norms of the gradients that parameters hold now, by block and group."""
    found: list[dict[str, float]] = []
    for _, block in blocks:
        groups: dict[str, float] = {}
        for member in members(block):
            if member.parameter.grad is not None:
                _add(groups, member, member.parameter.grad)
        found.append(groups)
    return found


@torch.no_grad()
def matrix_sizes(block: nn.Module) -> dict[str, float]:
    """Root mean square entry of a block's matrices, by group."""
    sums: dict[str, tuple[float, int]] = {}
    for member in members(block):
        if member.parameter.dim() < 2:
            continue
        for group, part in member.pieces(member.parameter):
            total, count = sums.get(group, (0.0, 0))
            sums[group] = (total + _norm(part) ** 2, count + part.numel())
    return {group: (total / max(count, 1)) ** 0.5 for group, (total, count) in sums.items()}


def _groups_of(block: Iterable[Member]) -> set[str]:
    """Groups with a gradient to come: a fused matrix stands for three."""
    return {name for m in block for name in (("query", "key", "value") if m.sizes else (m.group,))}


def _add(groups: dict[str, float], member: Member, gradient: Tensor) -> None:
    for group, part in member.pieces(gradient):
        groups[group] = (groups.get(group, 0.0) ** 2 + _norm(part) ** 2) ** 0.5


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.detach(), dtype=torch.promote_types(values.dtype, torch.float32)))


@torch.no_grad()
def _carry(before: Tensor, after: Tensor) -> float:
    cosine = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
    return float(cosine.mean())


def _exchanged(args: tuple, kwargs: dict, old: Tensor, new: Tensor) -> tuple[tuple, dict]:
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )
