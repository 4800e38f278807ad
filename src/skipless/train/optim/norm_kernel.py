"""The norm of many tensors together: each number is read once, and no sum depends on the order programs run in."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192  # numbers of one program
_AT_ONCE = 16  # tensors in one launch


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σx² over contiguous tensors of one dtype and device, in float32."""
    kernel: Any = _squares  # the decorated function takes more than its signature says
    counts = [triton.cdiv(tensor.numel(), _BLOCK) for tensor in tensors]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    first = 0
    for start in range(0, len(tensors), _AT_ONCE):
        part, ends = tensors[start : start + _AT_ONCE], tuple(itertools.accumulate(counts[start : start + _AT_ONCE]))
        if not ends[-1]:  # all empty
            continue
        kernel[(ends[-1],)](
            tuple(part), tuple(tensor.numel() for tensor in part), ends, sums[first:],
            COUNT=len(part), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        first += ends[-1]
    return sums.sum().sqrt()


@triton.jit
def _squares(tensors, sizes, ends, sums, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Σx² of one block of one tensor."""
    program = tl.program_id(0)
    start = 0
    for index in tl.static_range(COUNT):
        if (program >= start) & (program < ends[index]):
            offsets = (program - start).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(tensors[index] + offsets, mask=offsets < sizes[index], other=0.0).to(tl.float32)
            tl.store(sums + program, tl.sum(x * x, 0))
        start = ends[index]
