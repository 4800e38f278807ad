"""Products of a few rows, as in decoding: whether one pass over the weights by a kernel of our own serves them.

torch's library picks kernels for many rows there: on an H200 7 µs for a matrix of 1024 × 1024 in bfloat16, which can be
read in half a microsecond. A whole token of 36 blocks × 1024 takes half the time by this one (docs/speed.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from skipless.ops import triton

_HALF = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)
_MOST_ROWS, _MOST_MATRICES = 4, 3
_ALIGNMENT = 16  # of a matrix's sides, so that every row starts where Triton may read 16 bytes
# Larger matrices are left to torch: its kernel reads an unembedding at 3.4 TB/s, this one a block of width 1024 at 1.5.
_FEWEST_COLUMNS, _MOST_ENTRIES = 256, 2**25


def serves(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether few_rows_linear can compute x (…, k) times these matrices (n, k), and no gradient is asked of it."""
    if not (x.is_cuda and triton.INSTALLED and torch.version.hip is None) or torch.is_autocast_enabled(x.device.type):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
        return False
    return fits(x, weights)


def fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether these are few rows in half precision, of sizes that the kernel takes and is made for."""
    k = x.shape[-1]
    if not all(type(t) in _PLAIN for t in (x, *weights)):  # others, such as quantised ones, hold no such memory
        return False
    alike = all((w.dtype, w.device, w.shape[1]) == (x.dtype, x.device, k) for w in weights)
    if not alike or x.dtype not in _HALF or not 1 <= len(weights) <= _MOST_MATRICES:
        return False
    aligned = k % _ALIGNMENT == 0 and all(w.shape[0] and w.shape[0] % _ALIGNMENT == 0 for w in weights)
    entries = sum(w.numel() for w in weights)
    return aligned and k >= _FEWEST_COLUMNS and 0 < x.numel() <= _MOST_ROWS * k and entries <= _MOST_ENTRIES
