"""Softmax cross entropy of rows of logits, and its gradient in their place: one GPU kernel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


@triton.jit
def row_kernel(logits, stride, targets, losses, columns, scale, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its logsumexp in one pass, then (softmax − onehot)·scale over the logits in a second."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    highest = -float("inf")
    total = 0.0
    picked = 0.0
    for start in range(0, columns, BLOCK):
        at = start + offsets
        value = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(value - higher), 0)
        picked += tl.sum(tl.where(at == target, value, 0.0), 0)
        highest = higher
    normaliser = highest + tl.log(total)
    known = (target >= 0) & (target < columns)
    tl.store(losses + row, tl.where(known, normaliser - picked, float("nan")))
    if WRITE:
        factor = tl.where(known, scale, float("nan"))
        for start in range(0, columns, BLOCK):
            at = start + offsets
            value = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
            slope = (tl.exp(value - normaliser) - tl.where(at == target, 1.0, 0.0)) * factor
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < columns)


def each_row(logits: Tensor, targets: Tensor, losses: Tensor, rows: int, write: bool) -> None:
    """plain_each_row for float32 and half precision. A target that is no column gives NaN."""
    kernel: Any = row_kernel  # the decorated function takes more than its signature says
    columns = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):
        kernel[(logits.shape[0],)](
            logits, logits.stride(0), targets, losses, columns, 1.0 / rows, WRITE=write, BLOCK=block, num_warps=_WARPS
        )
