"""How much of a signal rounding takes away: one network in its own precision and in half of it, block by block."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from skipless.inspection.hooks import batch_second, check_locations, find_blocks, hidden, rows_first, uncompiled
from skipless.inspection.inspect import (
    Batch,
    check_batch,
    evaluating,
    model_inputs,
    padding,
    rows_and_length,
    unwrapped,
)
from skipless.inspection.inspection import Inspection
from skipless.ops.precision import HALF, autocast


@torch.no_grad()
def rounding(
    model: nn.Module,
    batch: Batch,
    precision: Literal["bf16", "fp16"] = "bf16",
    *,
    blocks: Sequence[str] | str | None = None,
) -> list[float]:
    """‖x̂ − x‖/‖x − x̄‖ after every block, first to last: what rounding adds, over what tells locations apart.

    x is computed in the parameters' precision, x̂ under autocast in `precision`; x̄ is the mean of a row's locations,
    padding left out. What one block of a network without skips adds, all that follow hand on, so that it grows with
    depth. model, batch and blocks are as for `inspect`; the model is left as it was.
    """
    if precision not in HALF:
        raise ValueError(f"precision is {precision!r}; use 'bf16' or 'fp16'")
    model = unwrapped(model)
    check_batch(model, batch, None)
    found = [block for _, block in find_blocks(model, blocks)]
    exact, rounded = _outputs(model, batch, found, "fp32"), _outputs(model, batch, found, precision)
    keep = padding(batch)
    check_locations(exact[0], keep)
    return [_share(x, y, keep) for x, y in zip(exact, rounded, strict=True)]


def with_rounding(found: Inspection, shares: Sequence[float]) -> Inspection:
    """The inspection of a network with what `rounding` says of it; nothing is rounded before the first block."""
    blocks = zip(found.blocks, (0.0, *shares), strict=True)
    return replace(found, blocks=tuple(replace(block, rounding=share) for block, share in blocks))


def _outputs(model: nn.Module, batch: Batch, blocks: list[nn.Module], precision: str) -> list[Tensor]:
    """What every block gives, as (rows, T, width); "fp32" leaves the parameters' precision as it is."""
    given: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, output: given.append(hidden(output))) for block in blocks]
    device = next(model.parameters()).device
    try:
        with evaluating(model), uncompiled(model), autocast(precision, device):
            args, kwargs = model_inputs(model, batch)
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if len(given) != len(blocks):
        raise ValueError(
            f"{len(given)} outputs came from {len(blocks)} blocks; name those that run, once each: blocks=[…]"
        )
    swapped = batch_second(given[0], blocks, rows_and_length(batch))
    return [rows_first(x, swapped) for x in given]


def _share(exact: Tensor, rounded: Tensor, keep: Tensor | None) -> float:
    real = torch.ones_like(exact[..., :1], dtype=torch.bool) if keep is None else keep[..., None].to(exact.device)
    error = (rounded.double() - exact.double()).where(real, 0.0)
    mean = exact.double().where(real, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    apart = (exact.double() - mean).where(real, 0.0)
    return float(error.norm() / apart.norm())
