"""Clipping by the norm of all gradients together. Pascanu et al. 2013; 0.1 in App. H."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from skipless.train.optim.sharding import gathered
from skipless.train.optim.twins import gradient_of

_NEAR_ZERO = 1e-6  # torch's own


def clip_gradients(parameters: Iterable[Tensor], limit: float | None = 0.1) -> Tensor:
    """Scale all gradients by min(1, limit/norm) and return the norm before it; None only measures.

    The norm stays on the device, so nothing waits for it. It is that of the whole model where parameters are sharded.
    A norm that is not finite makes every gradient so: look at it before the step.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gathered(get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters]))
    if limit is not None:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm


def clip_factor(
    parameters: Iterable[Tensor], limit: float | None = 0.1, scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """The norm and min(1, limit/norm), for an optimiser that scales gradients itself, and takes those of twins.

    Where gradients come `scale` times too large, the norm is that of the true ones and the factor makes up for it.
    """
    alike: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := gradient_of(parameter)) is not None:
            alike.setdefault(gradient.dtype, []).append(gradient)
    norm = torch.linalg.vector_norm(torch.stack([each for several in alike.values() for each in _norms(several)]))
    norm = norm / scale
    if limit is None:
        return norm, None if scale == 1.0 else torch.full_like(norm, 1.0 / scale)
    return norm, (limit / (norm + _NEAR_ZERO)).clamp(max=1.0) / scale


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Numbers whose squares sum to that of all of these, which are of one dtype."""
    if not all(served(tensor) for tensor in tensors):
        return list(torch._foreach_norm(tensors, 2.0, torch.float32))
    from skipless.train.optim.norm_kernel import norm

    return [norm(tensors)]


def served(tensor: Tensor) -> bool:
    """Whether the kernel reads it."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.dtype != torch.float64
