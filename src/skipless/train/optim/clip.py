"""Clipping by the norm of all gradients together. Pascanu et al. 2013; 0.1 in App. H."""

from collections.abc import Iterable
from typing import cast

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from skipless.train.optim.sharding import gathered


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
