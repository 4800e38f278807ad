"""Adam with GPU kernels, and clipping of gradients."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Adam, Optimizer

from skipless.training.distributed import gathered
from skipless.training.optim.half_weights import forget_gradient, gradient_of, half_copy

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
    from skipless.ops.gpu.adam import norm

    return [norm(tensors)]


def served(tensor: Tensor) -> bool:
    """Whether the kernel reads it."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.dtype != torch.float64


class FusedAdam(Adam):
    """torch's Adam (or AdamW, with decoupled_weight_decay) with the same state and the same update.

    step(scale=…) takes gradients times a number on the device, as clipping asks for, without writing them; and the
    gradients of twins (see HalfWeights), which it keeps equal to their parameters. With twins, or a scale, where all
    is float32 on CUDA and not sharded, that is one kernel for several tensors; otherwise torch's own update does it.
    """

    @torch.no_grad()
    def step(self, closure=None, *, scale: Tensor | None = None):
        """One update of every parameter that has a gradient."""
        plain = closure is not None or (scale is None and not self._has_twins())
        if plain or not all(serves(group) for group in self.param_groups):
            return self._plain_step(closure, scale)
        for group in self.param_groups:
            self._update(group, scale)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of twins too."""
        super().zero_grad(set_to_none)
        for _, twin in self._pairs():
            forget_gradient(twin)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and their twins, those that have one."""
        found = [(p, half_copy(p)) for group in self.param_groups for p in group["params"]]
        return [(p, twin) for p, twin in found if twin is not None]

    def _has_twins(self) -> bool:
        return bool(self._pairs())

    def _plain_step(self, closure, scale: Tensor | None):
        """torch's own: twins hand their gradients over, and are cast anew."""
        pairs = self._pairs()
        for parameter, _ in pairs:
            if (gradient := gradient_of(parameter)) is not None:
                parameter.grad = gradient.to(parameter.dtype)
        if scale is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, scale)
        loss = super().step(closure)
        for parameter, twin in pairs:
            twin.copy_(parameter)
        return loss

    def _update(self, group: dict[str, Any], scale: Tensor | None) -> None:
        from skipless.ops.gpu.adam import Constants, Moments, update

        found = [(p, g) for p in group["params"] if (g := gradient_of(p)) is not None]
        if not found:
            return
        device = found[0][0].device
        states = [self._state_of(parameter) for parameter, _ in found]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        scale = torch.ones((), device=device) if scale is None else scale
        constants = Constants(
            _on_device(group["lr"], device),
            scale,
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )
        alike: dict[Any, list[Moments]] = {}
        for (parameter, gradient), state in zip(found, states, strict=True):
            twin = half_copy(parameter)
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            twin = parameter if twin is None else twin
            moments = Moments(state["step"], parameter, gradient, state["exp_avg"], state["exp_avg_sq"], twin)
            alike.setdefault((gradient.dtype, twin.dtype), []).append(moments)
        for several in alike.values():
            update(several, constants)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        elif state["step"].device != parameter.device:  # of a state that torch's plain update has left
            state["step"] = state["step"].to(parameter.device)
        return state


def serves(group: dict[str, Any]) -> bool:
    """Whether the kernel can update this group's parameters."""
    if group.get("amsgrad") or group.get("maximize"):
        return False
    return all(
        p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and not isinstance(p, DTensor)
        for p in group["params"]
    )


def takes_twins(optimizer: Optimizer) -> bool:
    """Whether the optimiser steps by twins' gradients."""
    return isinstance(optimizer, FusedAdam) and all(serves(group) for group in optimizer.param_groups)


def _on_device(rate: float | Tensor, device: torch.device) -> Tensor:
    return rate.to(device) if isinstance(rate, Tensor) else torch.full((), rate, device=device)
