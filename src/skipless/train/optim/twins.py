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
    twin = twin_of(parameter)
    return parameter.grad if twin is None or twin.grad is None else twin.grad


def twin_of(parameter: Tensor) -> Tensor | None:
    """The parameter's twin, or None. Whoever updates the one without a version of its own must write the other."""
    return getattr(parameter, "twin", None)


class Twins:
    """A twin in `dtype` for the matrix of every nn.Linear in `model`, for training under autocast.

    Inside in_place() the network computes with the twins, and they receive the gradients: the same numbers as autocast
    gives, bit for bit, without a cast of every matrix forward and of every gradient backward. The parameters stay
    float32, and stay what is saved and optimised: FusedAdam takes the twins' gradients and writes both.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16):
        self._places = [
            (layer, cast(nn.Parameter, layer.weight))
            for layer in _linear_layers(model)
            if layer.weight.dtype == torch.float32 and not isinstance(layer.weight, DTensor)
        ]
        for _, matrix in self._places:
            vars(matrix)["twin"] = nn.Parameter(matrix.detach().to(dtype), matrix.requires_grad)
        self._versions = self._seen()

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The twins take the parameters' places in their layers meanwhile."""
        for layer, matrix in self._places:
            layer._parameters["weight"] = vars(matrix)["twin"]
        try:
            yield
        finally:
            for layer, matrix in self._places:
                layer._parameters["weight"] = matrix

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


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Layers whose matrix nobody else uses: autocast serves only products with it."""
    modules = list(model.modules())
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    return [module for module in modules if type(module) is nn.Linear and owners[id(module.weight)] == 1]
