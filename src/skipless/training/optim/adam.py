"""Adam with one GPU kernel for many tensors, and clipping of gradients."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Adam, Optimizer

from skipless.training.distributed import gathered
from skipless.training.optim.half_weights import HalfWeights

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
    gradients: Iterable[Tensor | None], limit: float | None = 0.1, scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """The norm and min(1, limit/norm), for an optimiser that scales gradients itself. Gradients may differ in dtype.

    Where gradients come `scale` times too large, the norm is that of the true ones and the factor makes up for it.
    """
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            alike.setdefault(gradient.dtype, []).append(gradient)
    norm = torch.linalg.vector_norm(torch.stack([each for several in alike.values() for each in _norms(several)]))
    norm = norm / scale
    if limit is None:
        return norm, None if scale == 1.0 else torch.full_like(norm, 1.0 / scale)
    return norm, (limit / (norm + _NEAR_ZERO)).clamp(max=1.0) / scale


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Numbers whose squares sum to that of all of these, which are of one dtype."""
    if not all(norm_supports(tensor) for tensor in tensors):
        return list(torch._foreach_norm(tensors, 2.0, torch.float32))
    from skipless.ops.gpu.adam import norm

    return [norm(tensors)]


def norm_supports(tensor: Tensor) -> bool:
    """Whether the norm's GPU kernel reads this tensor."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.dtype != torch.float64


class FusedAdam(Adam):
    """torch's Adam (or AdamW, with decoupled_weight_decay) with the same state and the same update.

    step(scale=…) takes gradients times a number on the device, as clipping asks for, without writing them. With
    half_weights set it takes the gradients of half-precision copies, and writes each copy after its parameter.
    Either way that is one GPU kernel for several tensors where all is float32 on CUDA and not sharded; elsewhere
    torch's own update does it.
    """

    half_weights: HalfWeights | None = None

    @torch.no_grad()
    def step(self, closure=None, *, scale: Tensor | None = None):
        plain = closure is not None or (scale is None and self.half_weights is None)
        if plain or not all(kernel_supports(group) for group in self.param_groups):
            return self._torch_step(closure, scale)
        for group in self.param_groups:
            self._update(group, scale)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of half-precision copies too."""
        super().zero_grad(set_to_none)
        if self.half_weights is not None:
            self.half_weights.zero_grad()

    def _torch_step(self, closure, scale: Tensor | None):
        """torch's own update: copies hand their gradients over to the parameters, and are written afterwards."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.half_weights is not None:
            for parameter in parameters:
                if (gradient := self.half_weights.gradient_of(parameter)) is not None:
                    parameter.grad = gradient.to(parameter.dtype)
        if scale is not None:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        # once a torch.optim.Adam exists its step calls hooks, and ours has called them: the one inside calls none
        inner: Any = Adam.step
        loss = (inner.__wrapped__ if getattr(inner, "hooked", False) else inner)(self, closure)
        if self.half_weights is not None:
            self.half_weights.write(parameters)
        return loss

    def _update(self, group: dict[str, Any], scale: Tensor | None) -> None:
        from skipless.ops.gpu.adam import Constants, Moments, update

        half = self.half_weights
        gradients = {p: p.grad if half is None else half.gradient_of(p) for p in group["params"]}
        found = [(p, g) for p, g in gradients.items() if g is not None]
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
            copy = None if half is None else half.copy_of(parameter)
            copy = parameter if copy is None else copy
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            moments = Moments(state["step"], parameter, gradient, state["exp_avg"], state["exp_avg_sq"], copy)
            alike.setdefault((gradient.dtype, copy.dtype), []).append(moments)
        for several in alike.values():
            update(several, constants)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        elif state["step"].device != parameter.device:  # of a state that torch's own update has left
            state["step"] = state["step"].to(parameter.device)
        return state


def kernel_supports(group: dict[str, Any]) -> bool:
    """Whether the GPU kernel can update this group's parameters."""
    if group.get("amsgrad") or group.get("maximize"):
        return False
    return all(
        p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and not isinstance(p, DTensor)
        for p in group["params"]
    )


def supports_half_weights(optimizer: Optimizer) -> bool:
    """Whether the optimiser steps by the gradients of half-precision copies."""
    return isinstance(optimizer, FusedAdam) and all(kernel_supports(group) for group in optimizer.param_groups)


def _on_device(rate: float | Tensor, device: torch.device) -> Tensor:
    return rate.to(device) if isinstance(rate, Tensor) else torch.full((), rate, device=device)
