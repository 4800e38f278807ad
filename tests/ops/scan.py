"""A·v in O(T) by scans in torch, which have gradients: the oracle of attention at lengths that no matrix reaches."""

import torch
from torch import Tensor

from skipless.theory import exponential, uniform
from skipless.theory.shapes import ExponentialShape, UniformShape

_CHUNK = 64


def initial_attention(shape: ExponentialShape | UniformShape, values: Tensor) -> Tensor:
    """A @ values for values (…, T, d), in time and memory O(T), differentiable. float64 inside, values' dtype outside.

    ExponentialShape is a first-order filter along locations, UniformShape two running sums (He et al. 2023, Thm 3 and
    Thm 1, with the closed forms of `theory.exponential.apply` and `theory.uniform.apply`).
    """
    scan = _exponential if isinstance(shape, ExponentialShape) else _uniform
    return scan(shape, values.to(torch.float64)).to(values.dtype)


def _exponential(shape: ExponentialShape, values: Tensor) -> Tensor:
    """x = √D̄_in·v;  y_0 = x_0, y_t = e^{−γ'} y_{t−1} + λ (x_t − e^{−γ} x_{t−1});  out = y / √D̄_out."""
    step, length = shape.step, values.shape[-2]
    root_in, root_out = (
        values.new_tensor(exponential.mean_diagonal(gamma, shape.repeat_rate, length)).sqrt()[:, None]
        for gamma in (step.gamma_in, step.gamma_out)
    )
    x, decay = values * root_in, values.new_tensor([step.gamma_in, step.gamma_out]).neg().exp()
    drive = torch.cat([x[..., :1, :], step.lam * (x[..., 1:, :] - decay[0] * x[..., :-1, :])], dim=-2)
    return filtered(drive, decay[1]) / root_out


def _uniform(shape: UniformShape, values: Tensor) -> Tensor:
    """out_n = A_nn v_n + Σ_{j<n} U_j v_j + W_n Σ_{j<n} v_j."""
    factors = uniform.factors(shape.rho_in, shape.rho_out, values.shape[-2])
    column, row, diagonal = (values.new_tensor(factor)[:, None] for factor in factors)
    return diagonal * values + _sum_before(column * values) + row * _sum_before(values)


def filtered(drive: Tensor, decay: Tensor) -> Tensor:
    """y_t = decay·y_{t−1} + drive_t along the second-last axis, y_{−1} = 0.

    Chunks are filtered by one small matrix, and their last values, which follow the same law with decay^64, by the same
    function: no loop over locations.
    """
    length = drive.shape[-2]
    step = torch.arange(_CHUNK, device=drive.device)
    powers = decay ** (step[:, None] - step[None, :]).clamp(min=0)
    if length <= _CHUNK:
        return powers.tril()[:length, :length] @ drive
    padded = torch.nn.functional.pad(drive, (0, 0, 0, -length % _CHUNK)).unflatten(-2, (-1, _CHUNK))
    local = powers.tril() @ padded
    ends = filtered(local[..., -1, :], decay**_CHUNK)
    carried = torch.cat([torch.zeros_like(ends[..., :1, :]), ends[..., :-1, :]], dim=-2)
    y = local + (decay ** (step + 1))[:, None] * carried[..., None, :]
    return y.flatten(-3, -2)[..., :length, :]


def _sum_before(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(values[..., :1, :]), values[..., :-1, :].cumsum(dim=-2)], dim=-2)
