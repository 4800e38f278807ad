"""Matrices that stay orthogonal while they train: after each update a step towards the nearest such matrix.

Orthogonal matrices hand a signal on without changing its cosines. The paper starts with them, and lets training go.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from skipless.train.optim.sharding import gathered, resharded
from skipless.train.optim.twins import twin_of

# The iteration below takes singular values between 0 and √3 of their scale to it, and is quick near it.
_LEAST, _MOST, _NEAR = 0.5, 1.5, 0.5


def orthogonal_scale(matrix: Tensor) -> Tensor:
    """s of a matrix whose singular values are all s: their root mean square."""
    return torch.linalg.matrix_norm(matrix, keepdim=True) / math.sqrt(min(matrix.shape[-2:]))


def towards_orthogonal(matrices: Tensor, scales: Tensor) -> Tensor:
    """½(I − WWᵀ/s²)W of each W in (n, out, in): added to W, it takes a singular value s(1 + ε) to s(1 − 3ε²/2 − ε³/2).

    Newton and Schulz' iteration for the polar factor (Higham 2008, Sec. 8.3), with the product on the short side.
    scales: (n, 1, 1).
    """
    short = _shortfall(matrices, scales)
    tall = matrices.shape[-2] > matrices.shape[-1]
    return 0.5 * (matrices @ short if tall else short @ matrices)


def _shortfall(matrices: Tensor, scales: Tensor) -> Tensor:
    """I − WWᵀ/s², or I − WᵀW/s² where W is taller than wide: 0 for an orthogonal matrix."""
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    return torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device) - wide @ wide.mT / scales**2


def keep_orthogonal(optimizer: Optimizer, roles: Sequence[str]) -> None:
    """From now on every step of the optimiser ends with `towards_orthogonal` of the matrices in groups of these names.

    At the scale each has now, and in its own precision: in half of it the rounding would be as large as a step.
    ValueError where a matrix is not nearly orthogonal to begin with.
    """
    matrices = [p for group in optimizer.param_groups if group["name"] in roles for p in group["params"]]
    scales = [_checked_scale(gathered(matrix.detach())) for matrix in matrices]
    optimizer.register_step_post_hook(lambda *_: _correct(matrices, scales))


@torch.no_grad()
def _correct(matrices: list[Tensor], scales: list[Tensor]) -> None:
    alike: dict[tuple, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.device, matrix.dtype), []).append(index)
    for several in alike.values():
        those = [matrices[index] for index in several]
        changes = towards_orthogonal(
            torch.stack([gathered(matrix) for matrix in those]), torch.stack([scales[index] for index in several])
        )
        torch._foreach_add_(those, [resharded(c, p) for c, p in zip(changes.unbind(), those, strict=True)])
        for matrix in those:
            if (twin := twin_of(matrix)) is not None:
                twin.copy_(matrix)


def _checked_scale(matrix: Tensor) -> Tensor:
    scale = orthogonal_scale(matrix)
    off = _shortfall(matrix, scale)
    if float(torch.linalg.matrix_norm(off)) <= _NEAR:  # which bounds each eigenvalue, and is quick
        return scale
    values = (1.0 - torch.linalg.eigvalsh(off.double())).clamp(min=0.0).sqrt()
    if float(values.min()) >= _LEAST and float(values.max()) <= _MOST:
        return scale
    raise ValueError(
        f"keep_orthogonal wants matrices that start orthogonal; the singular values of one of {tuple(matrix.shape)} "
        f"are {float(values.min()):.3g} to {float(values.max()):.3g} times their root mean square. "
        "Use --set model.init=orthogonal, or leave its role out of optimizer.keep_orthogonal"
    )
