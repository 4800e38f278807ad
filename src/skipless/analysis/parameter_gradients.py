"""Gradients and sizes of parameters, reduced to one number per block and kind, and read when all are there."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from skipless.analysis.activation_stats import wide
from skipless.analysis.parameter_groups import Member, members


class GradientTaker:
    """A context in which every parameter's gradient is reduced to norms and dropped at once.

    Gradients that were there before are put back on leaving.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]):
        self._squares: list[dict[str, Tensor]] = [{} for _ in blocks]
        self._blocks = [members(block) for _, block in blocks]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._kept: list[Tensor | None] = []
        self._open = ExitStack()

    def __enter__(self) -> "GradientTaker":
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters):
            raise ValueError(
                "a parameter has hooks that run when its gradient is ready (an optimizer inside the backward pass?); "
                "an inspection would set them off: inspect before they are added"
            )
        self._kept = [p.grad for p in self._parameters]
        owners = {id(m.parameter): (index, m) for index, block in enumerate(self._blocks) for m in block}
        for parameter in self._parameters:
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(self._taker(owners.get(id(parameter))))
            self._open.callback(hook.remove)
        for squares, block in zip(self._squares, self._blocks, strict=True):
            squares.update(dict.fromkeys(_groups_of(m for m in block if m.parameter.requires_grad), torch.zeros(())))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        for parameter, gradient in zip(self._parameters, self._kept, strict=True):
            parameter.grad = gradient

    def _taker(self, owner: tuple[int, Member] | None):
        def take(parameter: Tensor) -> None:
            if owner is not None and parameter.grad is not None:
                _add(self._squares[owner[0]], owner[1], parameter.grad)
            parameter.grad = None

        return take

    @property
    def groups(self) -> list[dict[str, float]]:
        """Norms of the gradients that were taken, by block and group."""
        return [_roots(squares) for squares in self._squares]


def gradient_norms(blocks: Sequence[tuple[str, nn.Module]]) -> list[dict[str, float]]:
    """Norms of the gradients that parameters hold now, by block and group."""
    found: list[dict[str, float]] = []
    for _, block in blocks:
        squares: dict[str, Tensor] = {}
        for member in members(block):
            if member.parameter.grad is not None:
                _add(squares, member, member.parameter.grad)
        found.append(_roots(squares))
    return found


@torch.no_grad()
def matrix_sizes(block: nn.Module) -> dict[str, float]:
    """Root mean square entry of a block's matrices, by group."""
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for member in members(block):
        if member.parameter.dim() < 2:
            continue
        _add(squares, member, member.parameter)
        for group, part in member.pieces(member.parameter):
            counts[group] = counts.get(group, 0) + part.numel()
    return {group: norm / max(counts[group], 1) ** 0.5 for group, norm in _roots(squares).items()}


def _groups_of(block: Iterable[Member]) -> set[str]:
    """Groups with a gradient to come: a fused matrix stands for three."""
    return {name for m in block for name in (("query", "key", "value") if m.sizes else (m.group,))}


def _add(squares: dict[str, Tensor], member: Member, values: Tensor) -> None:
    for group, part in member.pieces(values.detach()):
        norm = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
        square = norm.to(wide(norm)).square()
        squares[group] = squares[group] + square if group in squares else square


def _roots(squares: dict[str, Tensor]) -> dict[str, float]:
    return {group: float(square) ** 0.5 for group, square in squares.items()}
