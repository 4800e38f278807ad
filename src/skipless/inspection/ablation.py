"""What a network loses when something of it is taken away: a block, the order of two, digits of its numbers.

Losses are in nats per token, over rows of text (rows, T+1), computed in the model's own precision.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from skipless.inspection.hooks import batch_second, check_locations, rows_first, undisturbed
from skipless.inspection.inputs import (
    Batch,
    answer,
    check_batch,
    padding,
    rows_and_length,
    unwrapped,
    with_decoder_ids,
)
from skipless.inspection.inspection import Inspection
from skipless.inspection.stacks import find_blocks, hidden, listening
from skipless.model.quantise import QUANTISATIONS, Quantisation, quantised
from skipless.model.transformer import Transformer
from skipless.ops.modes import HALF, autocast

_ROWS = 16  # at once
_RIDGE = 1e-6  # of the mean of the diagonal, so that the normal equations of few tokens have a solution


@torch.no_grad()
def text_loss(model: Transformer, rows: Tensor) -> float:
    """The mean loss of the next token over rows of T+1 tokens."""
    parts = [(float(model.loss(model.hidden(part[:, :-1]), part[:, 1:])), len(part)) for part in rows.split(_ROWS)]
    return sum(loss * count for loss, count in parts) / len(rows)


def quantised_loss(model: Transformer, rows: Tensor, how: Quantisation | str) -> float:
    """The loss with every matrix of the blocks rounded."""
    with quantised(model.blocks, how):
        return text_loss(model, rows)


def dropped_losses(model: Transformer, rows: Tensor) -> list[float]:
    """The loss without the first, the second, … block: its input is handed on as it is."""
    count = len(model.blocks)
    orders = ([at for at in range(count) if at != gone] for gone in range(count))
    return [_loss_in_order(model, rows, order) for order in orders]


def swapped_losses(model: Transformer, rows: Tensor) -> list[float]:
    """The loss with two neighbours exchanged, for each of the L−1 pairs."""
    count = len(model.blocks)
    orders = ([*range(at), at + 1, at, *range(at + 2, count)] for at in range(count - 1))
    return [_loss_in_order(model, rows, order) for order in orders]


def _loss_in_order(model: Transformer, rows: Tensor, order: Sequence[int]) -> float:
    with _reordered(model, order):
        return text_loss(model, rows)


@contextmanager
def _reordered(model: Transformer, order: Sequence[int]) -> Generator[None]:
    """While open, the model has these of its blocks, in this order."""
    before = model.blocks
    model.blocks = nn.ModuleList([before[index] for index in order])
    try:
        yield
    finally:
        model.blocks = before


@torch.no_grad()
def readout_losses(model: Transformer, fitted: Tensor, rows: Tensor) -> list[float]:
    """The loss of the next token read linearly from the embedding and after every block: L+1 numbers.

    x̂_L = W x_l + b is fitted by least squares on the rows of `fitted`, and the network's own unembedding reads x̂_L. It
    bounds from above what the best linear probe reaches. After the last block it is the network's own loss, but for a
    final norm, which is not linear.
    """
    maps = [_least_squares(*sums) for sums in _normal_equations(model, fitted)]
    losses, tokens = [0.0] * len(maps), 0
    for part in rows.split(_ROWS):
        states, _ = _states(model, part[:, :-1])
        for index, (state, (weight, bias)) in enumerate(zip(states, maps, strict=True)):
            guess = (state.double() @ weight + bias).to(state.dtype)
            losses[index] += float(model.loss(guess, part[:, 1:])) * part[:, 1:].numel()
        tokens += part[:, 1:].numel()
    return [loss / tokens for loss in losses]


def _states(model: Transformer, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """X_0 … X_L of the blocks, and what the unembedding reads: X_L after the final norm, where there is one."""
    given: list[Tensor] = []
    with listening([*model.each_block()], after=lambda index: lambda *passed: given.append(passed[-1])):
        last = model.hidden(tokens)
    return [model.embed(tokens), *given], last


def _normal_equations(model: Transformer, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(1, x)ᵀ(1, x) and (1, x)ᵀ x_L of every state, in float64."""
    sums: list[list[Tensor]] = []
    for part in rows.split(_ROWS):
        states, last = _states(model, part[:, :-1])
        target = last.flatten(0, 1).double()
        for index, state in enumerate(states):
            x = nn.functional.pad(state.flatten(0, 1).double(), (1, 0), value=1.0)
            products = [x.T @ x, x.T @ target]
            if index == len(sums):
                sums.append(products)
            else:
                sums[index] = [old + new for old, new in zip(sums[index], products, strict=True)]
    return ((gram, cross) for gram, cross in sums)


def _least_squares(gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """(weight, bias) with x·weight + bias nearest to the target."""
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solved = torch.linalg.solve(gram + ridge, cross)
    return solved[1:], solved[0]


@dataclass(frozen=True)
class Outliers:
    """What enters the matrices of a block, the worst of them: E[x⁴]/E[x²]² (3 for a normal distribution), max|x|/rms.

    Both have one scale for a whole tensor in mind, as rounding with a single scale does.
    """

    kurtosis: float
    largest: float


@torch.no_grad()
def outliers(model: Transformer, rows: Tensor) -> list[Outliers]:
    """Of every block, over rows of T+1 tokens."""
    sums: dict[nn.Module, Tensor] = {}  # of each matrix: count, Σx², Σx⁴, max|x|

    def listen(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0].double()
        seen = torch.stack([torch.as_tensor(float(x.numel())).to(x), x.pow(2).sum(), x.pow(4).sum(), x.abs().max()])
        before = sums.get(layer, torch.zeros_like(seen))
        sums[layer] = torch.cat([before[:3] + seen[:3], torch.maximum(before[3:], seen[3:])])

    blocks = [[m for m in block.modules() if isinstance(m, nn.Linear)] for block in model.each_block()]
    with listening([layer for layers in blocks for layer in layers], before=lambda index: listen):
        for part in rows.split(_ROWS):
            model.hidden(part[:, :-1])
    return [_worst([sums[layer] for layer in layers]) for layers in blocks]


def _worst(sums: Sequence[Tensor]) -> Outliers:
    found = []
    for count, square, fourth, most in (each.tolist() for each in sums):
        power = square / count
        found.append((fourth / count / power**2 if power else 0.0, most / power**0.5 if power else 0.0))
    return Outliers(max(kurtosis for kurtosis, _ in found), max(largest for _, largest in found))


@torch.no_grad()
def rounding(
    model: nn.Module,
    batch: Batch,
    precision: str = "bf16",
    *,
    blocks: Sequence[str] | str | None = None,
) -> list[float]:
    """‖x̂ − x‖/‖x − x̄‖ after every block, first to last: what rounding adds, over what tells locations apart.

    x is computed in the parameters' precision, x̂ under autocast in `precision`, "bf16" or "fp16", or with matrices and
    their inputs rounded as "int8", "fp8" and the others of skipless.model.quantise; x̄ is the mean of a row's locations,
    padding left out. What one block of a network without skips adds, all that follow hand on, so that it grows with
    depth. model, batch and blocks are as for `inspect`; the model is left as it was.
    """
    if precision not in (*HALF, *QUANTISATIONS):
        raise ValueError(f"precision is {precision!r}; use one of {', '.join((*HALF, *QUANTISATIONS))}")
    model = unwrapped(model)
    check_batch(model, batch, None)
    batch = with_decoder_ids(model, batch, None)
    found = [block for _, block in find_blocks(model, blocks)]
    exact = _outputs(model, batch, found, "fp32")
    with quantised(found, precision) if precision in QUANTISATIONS else nullcontext():
        rounded = _outputs(model, batch, found, precision)
    mask = padding(batch)
    check_locations(exact[0], mask)
    return [_share(x, y, mask) for x, y in zip(exact, rounded, strict=True)]


def with_rounding(found: Inspection, shares: Sequence[float]) -> Inspection:
    """The inspection of a network with what `rounding` says of it; nothing is rounded before the first block."""
    blocks = zip(found.blocks, (0.0, *shares), strict=True)
    return replace(found, blocks=tuple(replace(block, rounding=share) for block, share in blocks))


def _outputs(model: nn.Module, batch: Batch, blocks: list[nn.Module], precision: str) -> list[Tensor]:
    """What every block gives, as (rows, T, width); "fp32" leaves the parameters' precision as it is."""
    given: list[Tensor] = []
    device = next(model.parameters()).device
    with (
        listening(blocks, after=lambda index: lambda *passed: given.append(hidden(passed[-1]))),
        undisturbed(model),
        autocast(precision, device),
    ):
        answer(model, batch)
    if len(given) != len(blocks):
        raise ValueError(
            f"{len(given)} outputs came from {len(blocks)} blocks; name those that run, once each: blocks=[…]"
        )
    swapped = batch_second(given[0], blocks, rows_and_length(batch))
    return [rows_first(x, swapped) for x in given]


def _share(exact: Tensor, rounded: Tensor, mask: Tensor | None) -> float:
    real = torch.ones_like(exact[..., :1], dtype=torch.bool) if mask is None else mask[..., None].to(exact.device)
    error = (rounded.double() - exact.double()).where(real, 0.0)
    mean = exact.double().where(real, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    apart = (exact.double() - mean).where(real, 0.0)
    return float(error.norm() / apart.norm())
