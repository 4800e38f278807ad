"""Half-precision twins of a network's matrices: what autocast casts anew in every step, kept between steps instead."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

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
    """A twin in `dtype` for every weight and bias of an nn.Linear in `model`, for training under autocast.

    Inside in_place() the network computes with the twins, and they receive the gradients: the same numbers as autocast
    gives, bit for bit, without a cast of every matrix forward and of every gradient backward. The parameters stay
    float32, and stay what is saved and optimised: FusedAdam takes the twins' gradients and writes both.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16):
        self._places = [
            (layer, name, parameter)
            for layer in _linear_layers(model)
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.dtype == torch.float32 and not isinstance(parameter, DTensor)
        ]
        for _, _, parameter in self._places:
            vars(parameter)["twin"] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
        self._versions = self._seen()

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The twins take the parameters' places in their layers meanwhile."""
        for layer, name, parameter in self._places:
            layer._parameters[name] = vars(parameter)["twin"]
        try:
            yield
        finally:
            for layer, name, parameter in self._places:
                layer._parameters[name] = parameter

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast anew if anything but the optimiser's own kernel has changed a parameter since: a loaded checkpoint."""
        versions = self._seen()
        if versions != self._versions:
            twins = [vars(parameter)["twin"] for _, _, parameter in self._places]
            torch._foreach_copy_(twins, [parameter for _, _, parameter in self._places])
            self._versions = versions

    def _seen(self) -> list[int]:
        return [parameter._version for _, _, parameter in self._places]


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """No gradients, on parameters and twins alike."""
    for parameter in parameters:
        parameter.grad = None
        if (twin := twin_of(parameter)) is not None:
            twin.grad = None


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Layers whose parameters nobody else uses: autocast serves only products with them."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    return [layer for layer in layers if all(owners[id(p)] == 1 for p in layer.parameters(recurse=False))]
