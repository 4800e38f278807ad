"""Adam in one pass over memory: clipping, the update and the half-precision twin together."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from skipless.train.optim.twins import forget_gradient, gradient_of, twin_of


class FusedAdam(Adam):
    """torch's Adam (or AdamW, with decoupled_weight_decay) with the same state and the same update.

    step(scale=…) takes gradients times a number on the device, as clipping asks for, without writing them; and the
    gradients of twins (see Twins), which it keeps equal to their parameters. Where there are twins, or a scale, and all
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
        found = [(p, twin_of(p)) for group in self.param_groups for p in group["params"]]
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
        from skipless.train.optim.adam_kernel import Constants, Moments, update

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
            twin = twin_of(parameter)
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
