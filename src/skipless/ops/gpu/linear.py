"""A small batch times matrices of the same input, in one pass over their weights: a GPU kernel as a torch operator."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

_MATRICES = 3
_ENTRIES = 8192  # of a matrix in a program: eight loads of 16 bytes to a thread, all on their way at once
_WARPS = 4
_PROGRAMS = 264  # two for each multiprocessor of a large GPU


@triton.jit
def rows_times(
    x, first, second, third, bias, y, rows, n, k,
    BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of y = x·(first | second | third)ᵀ + bias. The matrices have n[0], n[1], n[2] rows of k."""
    start, number = tl.program_id(0) * BLOCK_N, tl.arange(0, ROWS)[:, None]
    weight, row = first, start
    if start >= n[0] + n[1]:
        weight, row = third, start - n[0] - n[1]
    elif start >= n[0]:
        weight, row = second, start - n[0]
    weight += row.to(tl.int64) * k + tl.arange(0, BLOCK_N)[:, None] * k
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for left in range(0, k, BLOCK_K):
        column = left + tl.arange(0, BLOCK_K)[None, :]
        entries = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
        inputs = tl.load(x + number * k + column, mask=(column < k) & (number < rows), other=0.0).to(tl.float32)
        total += tl.sum(inputs[:, None, :] * entries[None, :, :], 2)
    at = start + tl.arange(0, BLOCK_N)[None, :]
    if BIASED:
        total += tl.load(bias + at).to(tl.float32)
    tl.store(y + number * (n[0] + n[1] + n[2]) + at, total.to(y.dtype.element_ty), mask=number < rows)


def block(widths: list[int], k: int) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_K): as much of a row as fits, and so many rows that there are programs enough."""
    across = min(2048, triton.next_power_of_2(k))
    down = min(16, _ENTRIES // across)
    while down > 1 and sum(widths) // down < _PROGRAMS:
        down //= 2
    return down, across


@library.custom_op("skipless::small_batch_linear", mutates_args=())
def small_batch_linear(x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
    """x (…, k) times each of up to three matrices (n, k), side by side, plus a bias of all; n and k multiples of 16."""
    kernel: Any = rows_times  # the decorated function takes more than its signature says
    flat, widths = x.reshape(-1, x.shape[-1]).contiguous(), [weight.shape[0] for weight in weights]
    rows, k = flat.shape
    y = flat.new_empty(rows, sum(widths))
    down, across = block(widths, k)
    matrices = [weight.contiguous() for weight in weights]
    padding = _MATRICES - len(weights)
    with torch.cuda.device_of(x):
        kernel[(sum(widths) // down,)](
            flat, *matrices, *[matrices[0]] * padding, flat if bias is None else bias.contiguous(), y, rows,
            (*widths, *[0] * padding), k, BIASED=bias is not None, ROWS=triton.next_power_of_2(rows), BLOCK_N=down,
            BLOCK_K=across, num_warps=_WARPS,
        )  # fmt: skip
    return y.unflatten(0, x.shape[:-1])


@small_batch_linear.register_fake
def _(x, weights, bias):
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))
