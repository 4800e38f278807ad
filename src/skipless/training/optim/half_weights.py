"""Half-precision twins of a network's matrices: what autocast casts anew in every step, kept between steps instead."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of the last backward pass: the twin's, where there is one, in the twin's precision."""
    twin = half_copy(parameter)
    if twin is None:
        return parameter.grad
    joined, rows = vars(twin).get("joined", (None, slice(0)))
    if joined is None or joined.grad is None:
        return parameter.grad if twin.grad is None else twin.grad
    return joined.grad[rows] if twin.grad is None else joined.grad[rows] + twin.grad


def half_copy(parameter: Tensor) -> Tensor | None:
    """The parameter's twin, or None. Whoever updates the one without a version of its own must write the other."""
    return getattr(parameter, "twin", None)


def forget_gradient(twin: Tensor) -> None:
    """Its own, and its share in that of the matrix it is joined in."""
    twin.grad = None
    if "joined" in vars(twin):
        vars(twin)["joined"][0].grad = None


class HalfWeights:
    """A twin in `dtype` for the matrix of every nn.Linear in `model`, for training under autocast.

    Inside in_place() the network computes with the twins, and they receive the gradients: the same numbers as autocast
    gives, bit for bit, without a cast of every matrix forward and of every gradient backward. The parameters stay
    float32, and stay what is saved and optimised: FusedAdam takes the twins' gradients and writes both.

    Modules that compute several products of one input as one, attention's, name those layers by joined_layers(). Their
    twins lie side by side in one matrix, which the module finds as its `joined` and need not put together in each step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16):
        self._places = [
            (layer, cast(nn.Parameter, layer.weight))
            for layer in _linear_layers(model)
            if layer.weight.dtype == torch.float32 and not isinstance(layer.weight, DTensor)
        ]
        for _, matrix in self._places:
            vars(matrix)["twin"] = nn.Parameter(matrix.detach().to(dtype), matrix.requires_grad)
        self._joined = [(module, _join(twins)) for module in model.modules() if (twins := _side_by_side(module))]
        self._versions = self._seen()

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The twins take the parameters' places in their layers meanwhile."""
        for layer, matrix in self._places:
            layer._parameters["weight"] = vars(matrix)["twin"]
        for module, joined in self._joined:
            vars(module)["joined"] = joined
        try:
            yield
        finally:
            for layer, matrix in self._places:
                layer._parameters["weight"] = matrix
            for module, _ in self._joined:
                vars(module)["joined"] = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast anew if anything but the optimiser's own kernel has changed a parameter since: a loaded checkpoint."""
        versions = self._seen()
        if versions != self._versions:
            twins = [vars(matrix)["twin"] for _, matrix in self._places]
            torch._foreach_copy_(twins, [matrix for _, matrix in self._places])
            self._versions = versions

    def _seen(self) -> list[int]:
        return [matrix._version for _, matrix in self._places]


def _side_by_side(module: nn.Module) -> list[nn.Parameter]:
    """The twins of its joined layers, if each has one and all or none are trained."""
    layers = getattr(module, "joined_layers", tuple)()
    twins = [half_copy(layer.weight) for layer in layers if isinstance(layer, nn.Linear)]
    found = [twin for twin in twins if isinstance(twin, nn.Parameter)]
    alike = len({twin.requires_grad for twin in found}) == 1
    return found if alike and len(found) == len(layers) else []


def _join(twins: list[nn.Parameter]) -> nn.Parameter:
    """One matrix of these, each of which becomes some of its rows."""
    joined = nn.Parameter(torch.cat([twin.detach() for twin in twins]), twins[0].requires_grad)
    start = 0
    for twin in twins:
        rows = slice(start, start + twin.shape[0])
        twin.data, vars(twin)["joined"], start = joined.detach()[rows], (joined, rows), rows.stop
    return joined


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Layers whose matrix nobody else uses: autocast serves only products with it."""
    modules = list(model.modules())
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    return [module for module in modules if type(module) is nn.Linear and owners[id(module.weight)] == 1]
