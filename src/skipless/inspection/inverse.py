"""Activations recomputed backwards: the input of a block found from its output, so that it need not be stored.

A sub-block y = f(x) is solved for x by sweeps x ← x + P(y − f(x)), with half the step where that leads away:

    skip      y = αx + βf(x): P = 1/α, which converges where the branch is a contraction (Behrmann et al. 2019)
    MLP       y = W₂φ(W₁x): P = (W₂ diag(s) W₁)⁻¹, s the mean slope of every hidden unit. A mirrored MLP starts linear,
              and the first sweep is then exact
    attention y = A(x)V(x)W_O: x = W_V⁻¹ A(x)⁻¹ y W_O⁻¹ with A of the last sweep, a triangular solution by head

Rounding grows by each block's condition number, however many sweeps there are. Attention that has been trained can give
the same output for two inputs; then the sweeps may find the other one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipless.model.transformer import Transformer
from skipless.nn.attention import ShapedAttention
from skipless.nn.block import MLP, Block, SubBlock
from skipless.nn.position import Positions
from skipless.ops.reference import attend_with_weights, score_terms

SWEEPS = 20


@dataclass(frozen=True)
class Recomputed:
    """Relative errors ‖x̂ − x‖/‖x‖ of the input of every block, first to last.

    alone: found from the block's own output as it was. chained: found from the last block's output, through all blocks
    between, as training without stored activations would. inf where sweeps left the numbers.
    """

    alone: tuple[float, ...]
    chained: tuple[float, ...]


@torch.no_grad()
def recomputed(model: Transformer, tokens: Tensor, sweeps: int = SWEEPS) -> Recomputed:
    """Run tokens (rows, T) forward and then backward, in the model's precision."""
    if model.config.norm == "post":
        raise ValueError("norm is 'post': what a norm after the skip divides by is lost; use 'pre' or 'none'")
    positions = model.positions(model.embed(tokens))
    states = [model.embed(tokens)]
    for block in model.each_block():
        states.append(block(states[-1], positions))
    alone, chained, found = [], [], states[-1]
    for block, before, after in reversed(list(zip(model.each_block(), states[:-1], states[1:], strict=True))):
        alone.append(_error(block_input(block, after, positions, sweeps), before))
        found = block_input(block, found, positions, sweeps)
        chained.append(_error(found, before))
    return Recomputed(tuple(reversed(alone)), tuple(reversed(chained)))


def block_input(block: Block, y: Tensor, positions: Positions, sweeps: int = SWEEPS) -> Tensor:
    """The x (rows, T, width) with block(x) = y, as near as so many sweeps come."""
    if block.mlp is not None:
        y = _solved(block.mlp, y, (), sweeps)
    return _solved(block.attention, y, (positions, None), sweeps)


def _solved(part: SubBlock, y: Tensor, args: tuple, sweeps: int) -> Tensor:
    inner, shortcut = part.inner, part.shortcut
    if shortcut != 0.0:
        return _swept(lambda x: part(x, *args), lambda _, gap: gap / shortcut, y, y / shortcut, sweeps)
    if part.norm_placement != "none":
        raise ValueError("a norm without a skip cannot be inverted: it forgets how long its input was")
    y = y / part.residual
    if isinstance(inner, MLP):
        return _swept(inner, lambda x, gap: _through_mlp(inner, x, gap), y, torch.zeros_like(y), sweeps)
    if not isinstance(inner, ShapedAttention) or not inner.shape.causal or inner.value_gains is not None:
        raise ValueError("only causal attention without gains on values can be inverted")
    if inner.options.readers:
        raise ValueError("attention with readers is a sum of products of its input, and is not inverted; use readers=0")
    x = torch.zeros_like(y)
    return _swept(lambda x: inner(x, *args), lambda x, gap: _through_attention(inner, x, gap, args[0]), y, x, sweeps)


def _swept(
    forward: Callable[[Tensor], Tensor], back: Callable[[Tensor, Tensor], Tensor], y: Tensor, x: Tensor, sweeps: int
) -> Tensor:
    """The iterate whose output is nearest to y; a step that leads away is halved, and that is a sweep too."""
    best, least, step, move = x, torch.inf, 1.0, torch.zeros_like(x)
    for _ in range(sweeps):
        gap = y - forward(x)
        size = float(gap.norm())
        if size < least:
            best, least, step, move = x, size, 1.0, back(x, gap)
        else:
            step /= 2.0
        x = best + step * move
    return best


def _through_mlp(mlp: MLP, x: Tensor, gap: Tensor) -> Tensor:
    hidden = mlp.up(x)
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        (slope,) = torch.autograd.grad(mlp.activation(leaf).sum(), leaf)
    jacobian = (mlp.down.weight * slope.mean(dim=(0, 1))) @ mlp.up.weight
    return torch.linalg.solve(jacobian, gap.mT).mT


def _through_attention(attention: ShapedAttention, x: Tensor, gap: Tensor, positions: Positions) -> Tensor:
    """W_V⁻¹ A(x)⁻¹ gap W_O⁻¹: the change of x that makes up for the gap while A stays."""
    inputs = attention.inputs(x, positions)
    matrix = attend_with_weights(inputs)[1] * score_terms(inputs)[2]
    heads = _undone(attention.output, gap).unflatten(-1, (-1, attention.head_width)).transpose(1, 2)
    values = torch.linalg.solve_triangular(matrix.to(heads.dtype), heads, upper=False)
    return _undone(attention.value, values.transpose(1, 2).flatten(2))


def _undone(layer: nn.Module, y: Tensor) -> Tensor:
    """x with layer(x) = y, for a square matrix or the identity."""
    return torch.linalg.solve(layer.weight, y.mT).mT if isinstance(layer, nn.Linear) else y


def _error(found: Tensor, exact: Tensor) -> float:
    error = float((found - exact).norm() / exact.norm())
    return error if error == error else float("inf")  # NaN
