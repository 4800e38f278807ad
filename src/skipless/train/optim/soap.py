"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner. Vyas et al. 2024, Algorithms 3 and 4."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from skipless.train.optim.sharding import gathered, resharded

_SIDES = ("left", "right")


class SOAP(torch.optim.Optimizer):
    """For a gradient G (rows, cols), with Q_L and Q_R the eigenvectors of averages of GGᵀ and GᵀG:

    M ← β₁M + (1−β₁)G, V ← β₂V + (1−β₂)(Q_LᵀGQ_R)², W ← (1 − ηλ)W − η·Q_L[(Q_LᵀM̂Q_R)/(√V̂ + ε)]Q_Rᵀ.

    Hats are Adam's bias corrections, so without bases this is Adam. The averages decay by β₂. Every
    `precondition_every` updates one power iteration Q ← qr(PQ) renews each basis, its columns (and V) first sorted by
    the eigenvalues they stand for, as the authors' code does. A side longer than max_precondition_width keeps the
    identity. The first gradient only sets up the bases and moves nothing.

    The step's number is kept on the host: steps do not wait for the device, but those that renew a basis may, so the
    step cannot be captured in a CUDA graph. Sharded parameters (FSDP2) are gathered; every rank holds the whole state.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_every: int = 10,
        max_precondition_width: int = 10_000,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_every": precondition_every,
            "max_precondition_width": max_precondition_width,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                _check_parameter(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, gathered(parameter.grad))
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        beta = group["betas"][1]
        if not state:
            state.update(_initial_state(gradient, group["max_precondition_width"]))
            _average_products(state, gradient, beta)
            for side in _bases(state):
                state[f"{side}_basis"] = _eigenvectors(state[f"{side}_average"])
            return
        state["step"] += 1
        direction = _direction(state, gradient, group["betas"], group["eps"])
        if group["weight_decay"]:
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.sub_(resharded(direction * group["lr"], parameter))
        _average_products(state, gradient, beta)
        if int(state["step"]) % group["precondition_every"] == 0:
            _renew_bases(state)


def _check_parameter(parameter: Tensor) -> None:
    if parameter.ndim != 2:
        raise ValueError(f"SOAP takes matrices, and one parameter is {tuple(parameter.shape)}; leave it to Adam")
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"SOAP's bases need float32 parameters, and one is {parameter.dtype}; keep float32 weights and use autocast"
        )


def _initial_state(gradient: Tensor, widest: int) -> dict[str, Tensor]:
    """Zeros; bases and averaged products only for sides that are not too long."""
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    for side, width in zip(_SIDES, gradient.shape, strict=True):
        if width <= widest:
            state[f"{side}_average"] = gradient.new_zeros(width, width)
            state[f"{side}_basis"] = torch.eye(width, dtype=gradient.dtype, device=gradient.device)
    return state


def _bases(state: dict[str, Tensor]) -> list[str]:
    return [side for side in _SIDES if f"{side}_basis" in state]


def _direction(state: dict[str, Tensor], gradient: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    """Q_L[(Q_LᵀM̂Q_R)/(√V̂ + ε)]Q_Rᵀ, after M and V have taken in the gradient."""
    step, average, squares = int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
    average.lerp_(gradient, 1.0 - betas[0])
    rotated = _rotate(state, gradient)
    squares.mul_(betas[1]).addcmul_(rotated, rotated, value=1.0 - betas[1])
    scale = (squares / (1.0 - betas[1] ** step)).sqrt_().add_(eps)
    return _rotate(state, _rotate(state, average) / scale, back=True) / (1.0 - betas[0] ** step)


def _rotate(state: dict[str, Tensor], matrix: Tensor, back: bool = False) -> Tensor:
    """Q_LᵀXQ_R, or Q_LXQ_Rᵀ on the way back."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        matrix = (left if back else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if back else right)
    return matrix


def _average_products(state: dict[str, Tensor], gradient: Tensor, beta: float) -> None:
    """GGᵀ on the left, GᵀG on the right."""
    for side in _bases(state):
        factor = gradient if side == "left" else gradient.mT
        state[f"{side}_average"].addmm_(factor, factor.mT, beta=beta, alpha=1.0 - beta)


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Columns from the largest eigenvalue down. Where float32 does not converge, float64 does."""
    try:
        vectors = torch.linalg.eigh(matrix).eigenvectors
    except torch.linalg.LinAlgError:
        vectors = torch.linalg.eigh(matrix.double()).eigenvectors.to(matrix.dtype)
    return vectors.flip(-1).contiguous()


def _renew_bases(state: dict[str, Tensor]) -> None:
    for axis, side in enumerate(_SIDES):
        if side not in _bases(state):
            continue
        basis = state[f"{side}_basis"]
        product = state[f"{side}_average"] @ basis
        order = (basis * product).sum(dim=0).argsort(descending=True, stable=True)
        basis.copy_(torch.linalg.qr(product[:, order]).Q)
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(axis, order))
