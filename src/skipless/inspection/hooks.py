"""Hooks that measure a network while it runs: activations as they leave each block, gradients as they come back.

One forward and one backward serve every number. Nothing but numbers is stored of a block once it is passed, and none is
read before both are over, so that a GPU is never waited for.
"""

import math
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from skipless.inspection.attention import AttentionStats, AttentionWatch, of_shaped
from skipless.inspection.gradients import BlockGradients, Weight, matrix_sizes
from skipless.inspection.inspection import BlockSignal
from skipless.inspection.stacks import TORCHS, check_recorded, hidden, is_called, listening
from skipless.inspection.statistics import (
    ActivationStats,
    Described,
    InspectOptions,
    describe,
    fetched,
    numbers_of,
    wide,
)
from skipless.nn.attention import ShapedAttention

_MEASURED = [each.name for each in fields(ActivationStats) if each.name not in ("norms", "picture")]


class Recorder:
    """A context in which the given blocks are measured. Outside it the model has no hook of ours.

    refused says why they could not be: a batch without two locations, or a block that runs twice, since its numbers
    would be of two places. live is for a training loop: each block's first run counts, further ones (gradient
    accumulation, recomputed activations) are let pass.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], options: InspectOptions, *, live: bool = False):
        self.blocks, self.options, self.live = list(blocks), options, live
        self.described: list[Described] = []
        self.last: Tensor | None = None
        self.watch = Stopwatch()
        self.current: int | None = None
        self.refused: str | None = None
        self.started = math.inf
        self.cut = False  # whether what enters the first block came without a gradient
        self.attached, self.joined = dict[int, bool](), dict[int, bool]()
        self._carries: dict[int, Tensor] = {}
        self._handed: dict[int, Tensor] = {}
        self._latest: tuple[int, Tensor] | None = None
        self._gradients: dict[int, Tensor] = {}
        self.sent = False  # whether unit gradients are sent to the last block
        self._returned: dict[int, Tensor] = {}
        self._attention: dict[int, Tensor] = {}
        self.swapped = False  # whether the stream is (T, rows, width)
        self._channels = self._expected = False
        self._entered: Tensor | None = None
        self._open = ExitStack()

    def __enter__(self) -> "Recorder":
        modules = [block for _, block in self.blocks]
        self._open.enter_context(listening(modules, lambda i: self._before(i + 1), lambda i: self._after(i + 1)))
        ours = [self._ask(block, index) for index, (_, block) in enumerate(self.blocks, 1) if self.options.attention]
        if not all(ours):
            self._open.enter_context(AttentionWatch(lambda: self.current, self._attention))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        self._entered, self.current = None, None

    def forget(self) -> None:
        """Let go of the tensors that only the two passes need."""
        self.last = self._latest = None

    @cached_property
    def stats(self) -> list[ActivationStats]:
        """Of what enters the first block, then of what leaves each."""
        return numbers_of(self.described)

    @cached_property
    def carries(self) -> dict[int, tuple[float, float, float]]:
        """(carry, kept, coefficient) as in BlockSignal, by block from 1."""
        found = {index: values.tolist() for index, values in _by_block(self._carries).items()}
        return {index: (carry, *_kept(entries, sums)) for index, (entries, *sums, carry) in found.items()}

    @cached_property
    def handed(self) -> dict[int, float]:
        """kept_back as in BlockSignal, by block from 1."""
        found = {index: values.tolist() for index, values in _by_block(self._handed).items()}
        return {index: _kept(entries, sums)[0] for index, (entries, *sums) in found.items()}

    @cached_property
    def gradients(self) -> dict[int, np.ndarray]:
        """Squared norms (rows, T) of the gradient at each block's output, 0 being the first one's input."""
        return {index: norms**2 for index, norms in _by_block(self._gradients).items()}

    @cached_property
    def returned(self) -> dict[int, np.ndarray]:
        """The same of the gradient that each block hands to what comes before it, by block from 1."""
        return {index: norms**2 for index, norms in _by_block(self._returned).items()}

    def signals(
        self, gradients: Sequence[BlockGradients], weights: Sequence[Mapping[str, Weight]]
    ) -> tuple[BlockSignal, ...]:
        """All numbers of what enters the first block and of what leaves each; gradients relative to the output's."""
        names = ["input", *(name for name, _ in self.blocks)]
        return tuple(
            BlockSignal(
                index,
                name,
                **{measured: getattr(stats, measured) for measured in _MEASURED},
                **self._gradient(index),
                **self._attended(index),
                **dict(zip(("carry", "kept", "coefficient"), self.carries.get(index, ()), strict=False)),
                attached=self.attached.get(index),
                joined=self.joined.get(index),
                kept_back=self.handed.get(index),
                parameter_gradients=gradients[index - 1].groups if index else {},
                parameter_sizes=matrix_sizes(weights[index - 1]) if index else {},
            )
            for index, (name, stats) in enumerate(zip(names, self.stats, strict=True))
        )

    def _attended(self, index: int) -> dict[str, float]:
        seen = self.attention.get(index)
        return {} if seen is None else {f"attention_{name}": value for name, value in vars(seen).items()}

    def _gradient(self, index: int) -> dict[str, float]:
        """What BlockSignal says of the gradient that arrives behind a block, and of the one that it hands back."""
        found, real, unit = {}, self.real, self._unit
        if (arrived := self.gradients.get(index)) is not None:
            found["gradient_mean"] = float(arrived.mean(where=real)) / unit
            found["gradient_max"] = float(arrived.max(where=real, initial=0.0)) / unit
            found["gradient_zeros"] = float((arrived == 0).mean(where=real))
        if (back := self.returned.get(index)) is not None:
            found["gradient_back"] = float(back.mean(where=real)) / unit
        return found

    @cached_property
    def _unit(self) -> float:
        """What gradients are relative to: the output's, or 1 where that is 0, not finite, or sent by us."""
        last = self.gradients.get(len(self.blocks))
        mean = math.nan if last is None or self.sent else float(last.mean(where=self.real))
        return mean if 0 < mean < math.inf else 1.0

    @property
    def locations(self) -> dict[str, np.ndarray]:
        """Squared norms and gradients by location, as in Inspection; none where locations are merged on the way."""
        if len({each.norms.shape for each in self.stats}) > 1:
            return {}
        found = {"norm": np.stack([each.norms for each in self.stats])}
        if self.reached and len(self.gradients) == len(self.stats):
            rows = np.stack([self.gradients[index] for index in range(len(self.stats))])
            counts = np.broadcast_to(self.real, rows.shape).sum(1)
            means = np.where(counts > 0, rows.sum(1, where=self.real) / np.maximum(counts, 1), np.nan)
            found["gradient"] = means / self._unit
        return found

    @property
    def kernels(self) -> np.ndarray | None:
        """Cosines of the first row after every block, where they were kept and are of one size."""
        pictures = [stats.picture for stats in self.stats if stats.picture is not None]
        return np.stack(pictures) if len({picture.shape for picture in pictures}) == 1 else None

    @property
    def reached(self) -> bool:
        """Whether a gradient has come to the last block."""
        return len(self.blocks) in self._gradients

    @property
    def complete(self) -> bool:
        """Whether every block ran and was measured."""
        return self.refused is None and len(self.described) == len(self.blocks) + 1

    @property
    def real(self) -> np.ndarray:
        """False at padding, (rows, T), or one True for all."""
        mask = self.options.mask
        return np.array(True) if mask is None else mask.cpu().numpy()

    @cached_property
    def attention(self) -> dict[int, AttentionStats]:
        """By block, from 1; blocks whose attention could not be seen are missing."""
        return {index: AttentionStats.of(sums) for index, sums in _by_block(self._attention).items()}

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
            try:
                x, changed = hidden([*args, *kwargs.values()]), None
                check_recorded(x, self.live)
            except ValueError as error:
                self.refused = str(error)
                return None
            recorded = torch.is_grad_enabled() and not self.live
            if index == 1:
                self.started = time.perf_counter()
                self.cut = recorded and not x.requires_grad
                if self.cut and is_called(module):
                    lifted = x.detach().requires_grad_()  # frozen embeddings: gradients still have to reach the blocks
                    changed = exchanged(args, kwargs, x, lifted)
                    x = lifted
                blocks = [block for _, block in self.blocks]
                self.swapped = batch_second(x, blocks, self.options.batch_shape, self.options.one_row)
                self._channels = channels_first(x, blocks)
                if not self._accepts(self._rows(x)):
                    return None
                self._note(0, x)
            elif recorded:
                self.joined[index] = x.requires_grad
            if recorded and x.requires_grad and is_called(module):
                old, x = x, x.clone()  # so that what this block hands back is told from what hooks make of it
                changed = exchanged(*(changed or (args, kwargs)), old, x)
                x.register_hook(lambda gradient: self._arrived(index, gradient, self._returned))
            self._entered, self.current = x.detach(), index
            self._expected = x.requires_grad or any(p.requires_grad for p in module.parameters())
            return changed

        return hook

    def _after(self, index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
            if self.current != index:
                return
            self.current, entered, self._entered = None, self._entered, None
            try:
                x = hidden(out)
                check_locations(self._rows(x)[:1], None)
            except ValueError as error:
                self.refused = str(error)
                return
            if entered is not None and entered.shape == x.shape:
                before, after = self._rows(entered), self._rows(x)
                self._carries[index] = torch.stack([*_carried(before, after), _carry(before, after)])
            if self._expected and (torch.is_grad_enabled() or not self.live):
                self.attached[index] = x.requires_grad
            self._note(index, x)
            if index == len(self.blocks) and not self.live:
                self.last = x

        return hook

    def _first_run(self, index: int) -> bool:
        """Whether this run of a block counts; where it comes out of turn, none does."""
        expected = max(len(self.described), 1)
        if self.refused is not None or index == expected:
            return self.refused is None
        if not self.live:
            name = self.blocks[index - 1][0]
            before = f"block {name} ran before {self.blocks[min(expected, len(self.blocks)) - 1][0]}"
            self.refused = (
                f"block {name} ran twice in one forward (shared weights?), so its signal has two depths"
                if index < expected
                else f"{before}; name blocks in the order they run"
            )
        return False

    def _accepts(self, x: Tensor) -> bool:
        rows, mask = self.options.rows, self.options.mask
        if (self.live or self.options.several) and mask is not None and mask.shape != x.shape[:2]:
            mask = None  # of something else, such as a text without the image before it
            self.options = replace(self.options, mask=None)
        try:
            check_locations(x[:rows], None if mask is None else mask[:rows])
        except ValueError as error:
            self.refused = str(error)
        return self.refused is None

    def _note(self, index: int, x: Tensor) -> None:
        """Measure activations now and their gradient when it comes."""
        options = self.options if index == 0 else replace(self.options, kernel=False)
        with self.watch.around(x.device):
            self.described.append(describe(self._rows(x.detach()), options))
        if index == 0 and x.requires_grad:
            self.attached[0] = True
        if x.requires_grad:
            x.register_hook(lambda gradient: self._arrived(index, gradient, self._gradients))

    def _arrived(self, index: int, gradient: Tensor, found: dict[int, Tensor]) -> None:
        with self.watch.around(gradient.device):
            rows = self._rows(gradient.detach())
            found.setdefault(index, torch.linalg.vector_norm(rows, dim=-1, dtype=wide(gradient)))
            if self.live:
                return
            if found is self._gradients:
                self._latest = index, rows
            elif self._latest is not None and self._latest[0] == index and self._latest[1].shape == rows.shape:
                self._handed.setdefault(index, torch.stack(_carried(self._latest[1], rows)))

    def _rows(self, x: Tensor) -> Tensor:
        return rows_first(x.movedim(1, -1) if self._channels else x, self.swapped)


_KEPT_ROWS = 4
_KEPT_NOISE = 0.1
_TINY = 1e-8  # as torch's own cosine_similarity


@torch.no_grad()
def _carried(before: Tensor, after: Tensor) -> list[Tensor]:
    """What `_kept` reads, of locations' differences from the row's mean before and after a block, x and y: how many
    entries they have, ⟨x, y⟩, ‖x‖, ‖y‖ and the mean cosine between the two at one location."""
    x, y = ((rows := z[:_KEPT_ROWS].to(wide(z))) - rows.mean(1, keepdim=True) for z in (before, after))
    product, norms = (x * y).sum(-1), [torch.linalg.vector_norm(z, dim=-1) for z in (x, y)]
    entries = torch.full_like(product[0, 0], x.numel())
    return [entries, product.sum(), *map(torch.linalg.vector_norm, norms), _cosine(product, *norms)]


@torch.no_grad()
def _carry(before: Tensor, after: Tensor) -> Tensor:
    """Mean cosine of a location before and after a block."""
    x, y = before.float(), after.float()
    norms = (torch.linalg.vector_norm(z, dim=-1) for z in (x, y))
    return _cosine((x * y).sum(-1), *norms)


def _cosine(product: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (product / (first.clamp(min=_TINY) * second.clamp(min=_TINY))).mean()


def _kept(entries: float, sums: Sequence[float]) -> tuple[float, float]:
    """(how much of a location's difference from the row's mean is kept, with what coefficient), of `_carried`.

    The coefficient is ⟨x, y⟩/⟨x, x⟩; what is kept is the larger of it and of the cosine. A block that adds much to
    little leaves a coefficient of chance, about ‖y‖/‖x‖ over the root of the number of entries: NaN where that may be
    all.
    """
    product, first, second, cosine = (float(each) for each in sums)
    if not first > 0:
        return math.nan, math.nan
    noise, coefficient = second / first / entries**0.5, product / first**2
    kept = math.nan if math.isnan(coefficient + cosine) else max(coefficient, cosine)
    return (kept, coefficient) if noise < _KEPT_NOISE or kept > 10 * noise else (math.nan, math.nan)


def _by_block(numbers: Mapping[int, Tensor]) -> dict[int, np.ndarray]:
    return dict(zip(numbers, fetched(list(numbers.values())), strict=True))


def exchanged(args: tuple, kwargs: dict, old: Tensor, new: Tensor) -> tuple[tuple, dict]:
    """A module's arguments with one tensor in another's place, also inside a plain tuple, list or dict; the last two
    stay the same objects, since the model may hold them."""

    def exchange(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(exchange, value))
        if type(value) in (list, dict):
            for place, each in [*(enumerate(value) if type(value) is list else value.items())]:
                value[place] = exchange(each)
        return new if value is old else value

    return exchange(args), exchange(kwargs)


def batch_second(
    x: Tensor,
    blocks: Sequence[nn.Module],
    given: tuple[int, int] | None,
    one_row: tuple[int, ...] | None = None,
) -> bool:
    """Whether a hidden state that enters or leaves the blocks is (T, rows, width).

    torch's own layers say so. Elsewhere `given`, (rows, T) of the batch's ids or mask, decides; where the two are
    equal, `one_row` does, the shape of what enters the first block when one row is run alone. Where neither can tell,
    the attention's batch_first does.
    """
    flagged = any(getattr(module, "batch_first", True) is False for block in blocks for module in block.modules())
    shape = tuple(x.shape[:2])
    if x.dim() != 3 or given is None or all(type(block) in TORCHS for block in blocks):
        return flagged
    if given[0] != given[1] and shape in (given, given[::-1]):
        return shape != given
    if one_row is not None and shape == given and one_row[:2] in ((1, given[1]), (given[1], 1)):
        return one_row[0] != 1
    return flagged


def channels_first(x: Tensor, blocks: Sequence[nn.Module]) -> bool:
    """Whether a hidden state on a grid is (rows, width, height, breadth), as convolutions read it."""
    if x.dim() != 4 or x.shape[1] == x.shape[-1]:
        return False
    first = {getattr(m, "in_channels", None) or getattr(m, "num_features", None) for m in blocks[0].modules()}
    return x.shape[1] in first and x.shape[-1] not in first


def rows_first(x: Tensor, swapped: bool) -> Tensor:
    """(rows, T, width) of a hidden state with or without rows, on a line or on a grid."""
    if x.dim() < 2:
        raise ValueError(
            f"a block gives {tuple(x.shape)}; name modules that map (batch, T, width) to the same: blocks=[…]"
        )
    if x.dim() == 2:
        return x[None]
    x = x.flatten(1, -2)
    return x.transpose(0, 1) if swapped else x


def check_locations(x: Tensor, mask: Tensor | None) -> None:
    """Raise unless every row of (rows, T, width) has two locations to compare and mask, False at padding, fits."""
    if x.shape[1] < 2:
        raise ValueError("the batch has 1 location per row; cosines compare locations, so give at least 2 tokens")
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)} but the first block reads {tuple(x.shape[:2])} locations; "
            "leave the mask out, or give one entry per location"
        )
    if mask is not None and int(mask.sum(-1).min()) < 2:
        raise ValueError("a row of the batch has fewer than 2 tokens outside the padding; leave such rows out")


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """In here the model is in evaluation mode and not compiled; each module's own mode is put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with uncompiled(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None]:
    """In here no module's call is compiled. Where attention is this library's, its kernels still are.

    Elsewhere torch.compile is off altogether, since a compiled function may call blocks from anywhere. Where nothing
    has loaded the compiler, nothing is compiled, and it is not loaded for this: that takes 100 MB and seconds.
    """
    compiled: list[Any] = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    calls = [module._compiled_call_impl for module in compiled]
    wrapped = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
    ours = any(isinstance(module, ShapedAttention) for module in model.modules())
    for module in compiled:
        module._compiled_call_impl = None
    stance = "default" if ours and not wrapped else "force_eager"
    try:
        with torch.compiler.set_stance(stance) if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


class Stopwatch:
    """Adds up the time of what runs inside `around`: a GPU's own, or the processor's where that is longer."""

    def __init__(self):
        self._host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, device: torch.device) -> Generator[None]:
        """Around one measurement on `device`."""
        started = time.perf_counter()
        began = _mark(device)
        try:
            yield
        finally:
            if began is not None:
                self._events.append((began, cast(torch.cuda.Event, _mark(device))))
            self._host += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """So far. Waits for the measurements on a GPU to be over."""
        if not self._events:
            return self._host
        for _, last in self._events:
            last.synchronize()
        return max(self._host, sum(first.elapsed_time(last) for first, last in self._events) / 1e3)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A moment in the GPU's work, or None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))
