"""Half-precision copies of a network's matrices, so that a step does not cast every matrix as autocast does."""

from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from skipless.nn.attention import ShapedAttention


class HalfWeights:
    """A copy in `dtype` of the matrix of every nn.Linear in `model`, for training under autocast.

    Inside in_place() the network computes with the copies, and they receive the gradients. The numbers are autocast's,
    bit for bit, without a cast of every matrix forward and of every gradient backward. The parameters stay float32,
    and stay what is saved and optimised: the optimiser takes gradient_of(parameter), updates the parameter, and then
    writes its copy.

    Attention may multiply its input by the matrices of queries, keys and values at once: those of its qkv_layers().
    Their copies are rows of one matrix, which attention is given by set_qkv_weight() inside in_place().
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16):
        self._layers = [
            (layer, cast(nn.Parameter, layer.weight))
            for layer in _linear_layers(model)
            if layer.weight.dtype == torch.float32 and not isinstance(layer.weight, DTensor)
        ]
        self._copies: dict[Tensor, nn.Parameter] = {
            matrix: nn.Parameter(matrix.detach().to(dtype), matrix.requires_grad) for _, matrix in self._layers
        }
        self._qkv: list[tuple[ShapedAttention, nn.Parameter]] = []
        self._rows: dict[Tensor, tuple[nn.Parameter, slice]] = {}  # of a parameter: the matrix qkv, and where in it
        for module in model.modules():
            if isinstance(module, ShapedAttention):
                self._lay_side_by_side(module)
        self._versions = self._seen()

    def __len__(self) -> int:
        return len(self._layers)

    def copy_of(self, parameter: Tensor) -> Tensor | None:
        """The parameter's half-precision copy, or None if it has none."""
        return self._copies.get(parameter)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The gradient of the last backward pass: the copy's, in its precision, where there is a copy."""
        copy = self.copy_of(parameter)
        if copy is None:
            return parameter.grad
        qkv, rows = self._rows.get(parameter, (None, slice(0)))
        if qkv is None or qkv.grad is None:
            return parameter.grad if copy.grad is None else copy.grad
        return qkv.grad[rows] if copy.grad is None else qkv.grad[rows] + copy.grad

    def zero_grad(self) -> None:
        for copy in self._copies.values():
            copy.grad = None
        for _, qkv in self._qkv:
            qkv.grad = None

    @torch.no_grad()
    def write(self, parameters: Iterable[Tensor]) -> None:
        """Cast these parameters, whose values have changed, into their copies, where they have one."""
        for parameter in parameters:
            if (copy := self.copy_of(parameter)) is not None:
                copy.copy_(parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast anew if anything but the optimiser's own kernel has changed a parameter since: a loaded checkpoint."""
        versions = self._seen()
        if versions != self._versions:
            torch._foreach_copy_(list(self._copies.values()), list(self._copies))
            self._versions = versions

    @contextmanager
    def in_place(self) -> Generator[None]:
        """While open, the copies stand in the parameters' places."""
        for layer, matrix in self._layers:
            layer._parameters["weight"] = self._copies[matrix]
        for attention, qkv in self._qkv:
            attention.set_qkv_weight(qkv)
        try:
            yield
        finally:
            for layer, matrix in self._layers:
                layer._parameters["weight"] = matrix
            for attention, _ in self._qkv:
                attention.set_qkv_weight(None)

    def _lay_side_by_side(self, attention: ShapedAttention) -> None:
        """Lay the copies of its qkv_layers() side by side, if each has one and all or none are trained."""
        layers = attention.qkv_layers()
        matrices = [layer.weight for layer in layers]
        copies = [self._copies[matrix] for matrix in matrices if matrix in self._copies]
        if len(copies) != len(layers) or len({copy.requires_grad for copy in copies}) != 1:
            return
        qkv = nn.Parameter(torch.cat([copy.detach() for copy in copies]), copies[0].requires_grad)
        start = 0
        for matrix, copy in zip(matrices, copies, strict=True):
            rows = slice(start, start + copy.shape[0])
            copy.data, self._rows[matrix], start = qkv.detach()[rows], (qkv, rows), rows.stop
        self._qkv.append((attention, qkv))

    def _seen(self) -> list[int]:
        return [matrix._version for matrix in self._copies]


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Layers whose matrix nobody else uses: autocast serves only products with it."""
    modules = list(model.modules())
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    return [module for module in modules if type(module) is nn.Linear and owners[id(module.weight)] == 1]
