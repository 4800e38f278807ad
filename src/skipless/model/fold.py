"""fold(model): neighbouring matrices of a vanilla transformer merged for inference, with the same outputs.

With neither skip nor norm between them, in the (out, in) layout of nn.Linear:

    W_O into the MLP:       W₁ ← α·W₁W_O       b₁ ← α·b₁ + β          (D is one number per location: it commutes)
    the activation:         W₂ ← γ·W₂          b₂ ← b₂ + γδ·W₂1       for φ̂(x) = γ(φ(αx+β)+δ)
    the stream, M = W_Q:    W₂ ← M·W₂          b₂ ← M·b₂              in the block before,
                            W_K ← W_K M⁻¹      W_V ← W_V M⁻¹          and W_Q is gone

W_O is d² of a block's 12d² weights (8.3 %), the stream's matrix another d² (16.7 % together). Graef, arXiv 2404.12362.

Any square one of W_Q, W_K, W_V serves as M, and the best conditioned is taken. Where W_Q starts at zero (SPA) this is
usually W_V, which starts orthogonal, so that models fold in full at initialisation too. With grouped queries W_K and
W_V are not square and only W_Q can serve.

The first block keeps its three matrices: before it stands the embedding, whose rows the unembedding shares.
In attention-only models W_O goes into the next block's three matrices (25 % of all blocks but the last).
Sub-blocks' residual weights are folded too. Value-SkipInit's two gains stay: they cost nothing.
Where W_V and W_O are the identity there is nothing to merge but the activation's constants: a stream of another basis
would have to be turned back for the values.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from skipless.model.fold_report import BlockFold, FoldReport
from skipless.model.folded import STREAMS, FoldedTransformer, Folding, Stream, check_foldable, foldable_streams
from skipless.model.transformer import Transformer
from skipless.nn.attention import ShapedAttention
from skipless.nn.block import Block
from skipless.nn.mlp import MLP
from skipless.theory.activations import ShapedActivation

Weights = dict[str, Tensor]

# A stream of condition number κ amplifies rounding by up to κ: at 1e4 in every block, logits at depth 36 keep 1e-9.
_LARGEST_CONDITION = 1e4


@torch.no_grad()
def fold(
    model: Transformer, *, max_condition: float | None = None, streams: Sequence[Stream] = STREAMS
) -> FoldedTransformer:
    """The same function with fewer matrices; its `report` says what was merged. The model given is left alone.

    max_condition bounds the condition number of a matrix that may become the stream. None is 1/√ε of the weights'
    dtype, which costs at most half its digits, and no more than 1e4 (float32: 2896, float16: 32, bfloat16: 11).
    streams restricts which of "query", "key" and "value" may: ("query",) is the classical fold, () only merges W_O.

    Products are computed in float64 and rounded once to the weights' dtype. Models with norms or skips are refused.
    """
    if isinstance(model, FoldedTransformer):
        raise ValueError("this model is folded already; fold the Transformer it came from")
    check_foldable(model.config)
    if unknown := [name for name in streams if name not in STREAMS]:
        raise ValueError(f"streams contains {unknown[0]!r}; it may contain {', '.join(map(repr, STREAMS))}")
    dtype = model.embedding.weight.dtype
    limit = default_max_condition(dtype) if max_condition is None else max_condition
    conditions = [_conditions(model, index, streams) for index in range(len(model.blocks))]
    folding = Folding(model.config, tuple(_best(found, limit) for found in conditions))
    folded = FoldedTransformer.empty(folding, impl=_attention(model.blocks[0]).options.impl)
    merged = _merged_state(model, folding)
    folded.load_state_dict({name: merged[name] for name in folded.state_dict()}, assign=True)
    folded.report = _report(model, folded, conditions, limit)
    return folded


def default_max_condition(dtype: torch.dtype) -> float:
    """1/√ε of the dtype, at most 1e4."""
    return min(torch.finfo(dtype).eps ** -0.5, _LARGEST_CONDITION)


def _conditions(model: Transformer, index: int, streams: Sequence[Stream]) -> dict[Stream, float]:
    """Condition numbers (2-norm) of the matrices that could become block `index`'s stream."""
    if index == 0:
        return {}
    attention = _attention(model.blocks[index])
    names = [name for name in foldable_streams(model.config) if name in streams]
    return {name: _condition(_exact(getattr(attention, name).weight)) for name in names}


def _condition(matrix: Tensor) -> float:
    values = torch.linalg.svdvals(matrix)
    return float(values[0] / values[-1]) if values[-1] > 0 else float("inf")


def _best(conditions: dict[Stream, float], limit: float) -> Stream | None:
    best = min(conditions, key=conditions.__getitem__, default=None)
    return best if best is not None and conditions[best] <= limit else None


def _merged_state(model: Transformer, folding: Folding) -> Weights:
    """The model's state dict with merged matrices in it, and those that are gone still there, unused."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for index, weights in enumerate(_merged_blocks(model, folding)):
        dtype = _attention(model.blocks[index]).key.weight.dtype
        for name, tensor in weights.items():
            # a copy: in float64, a matrix that nothing merged into is still the model's own
            state[f"blocks.{index}.{_key(name)}"] = tensor.to(dtype, copy=True)
    return state


def _merged_blocks(model: Transformer, folding: Folding) -> Iterator[Weights]:
    """Each block's merged matrices and biases, in float64."""
    carried: Tensor | None = None  # an attention-only block's W_O, on its way into the next block
    for index, block in enumerate(cast(list[Block], model.blocks)):
        weights = _read(block)
        stream = folding.streams[index]
        if stream is not None:
            basis = weights.pop(stream)
            weights |= {n: torch.linalg.solve(basis, weights[n], left=False) for n in STREAMS if n != stream}
        if carried is not None:
            weights |= {name: weights[name] @ carried for name in STREAMS}
        if block.mlp is not None:
            _merge_mlp(weights, folding.shaped)
            _change_basis(weights, _next_basis(model, folding, index))
        elif not folding.keeps_output(index):
            carried = weights.pop("output")
        yield weights


def _read(block: Block) -> Weights:
    """A block's matrices and biases in float64, with the sub-blocks' residual weights multiplied in."""
    layers = {name: getattr(_attention(block), name) for name in (*STREAMS, "output")}
    weights = {name: _exact(layer.weight) for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    if "output" in weights:
        weights["output"] = weights["output"] * block.attention.residual
    if block.mlp is not None:
        mlp, residual = cast(MLP, block.mlp.inner), block.mlp.residual
        up = _exact(mlp.up.weight) if "output" in weights else _exact(mlp.up.weight) * block.attention.residual
        weights |= {"up": up, "up_bias": _bias(mlp.up)}
        weights |= {"down": _exact(mlp.down.weight) * residual, "down_bias": _bias(mlp.down) * residual}
    return weights


def _attention(block: nn.Module) -> ShapedAttention:
    return cast(ShapedAttention, cast(Block, block).attention.inner)


def _merge_mlp(weights: Weights, shaped: ShapedActivation) -> None:
    """W_O, α and β into the first layer; γ and δ into the second."""
    weights["up"] = shaped.input_scale * weights["up"]
    if "output" in weights:
        weights["up"] = weights["up"] @ weights.pop("output")
    weights["up_bias"] = shaped.input_scale * weights["up_bias"] + shaped.input_shift
    weights["down"] = shaped.output_scale * weights["down"]
    weights["down_bias"] = weights["down_bias"] + shaped.output_shift * weights["down"].sum(dim=1)


def _next_basis(model: Transformer, folding: Folding, index: int) -> Tensor | None:
    """The matrix that makes block `index`'s output the next block's stream, or None."""
    stream = folding.streams[index + 1] if index + 1 < len(folding.streams) else None
    return None if stream is None else _exact(getattr(_attention(model.blocks[index + 1]), stream).weight)


def _change_basis(weights: Weights, basis: Tensor | None) -> None:
    if basis is not None:
        weights["down"], weights["down_bias"] = basis @ weights["down"], basis @ weights["down_bias"]


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64)


def _bias(layer: nn.Linear) -> Tensor:
    if layer.bias is None:
        return torch.zeros(layer.out_features, dtype=torch.float64, device=layer.weight.device)
    return _exact(layer.bias)


def _key(name: str) -> str:
    """ "query" → "attention.inner.query.weight", "up_bias" → "mlp.inner.up.bias"."""
    layer, _, kind = name.partition("_")
    return f"{'mlp' if layer in ('up', 'down') else 'attention'}.inner.{layer}.{kind or 'weight'}"


def _report(
    model: Transformer, folded: FoldedTransformer, conditions: list[dict[Stream, float]], limit: float
) -> FoldReport:
    rows = []
    for index, (stream, found) in enumerate(zip(folded.folding.streams, conditions, strict=True)):
        before, after = _size(model.blocks[index]), _size(folded.blocks[index])
        why_not = None if stream is not None else _why_not(folded.folding, index, found)
        rows.append(BlockFold(before, after, stream, found, why_not))
    return FoldReport(tuple(rows), limit, model.embedding.weight.dtype)


def _why_not(folding: Folding, index: int, conditions: dict[Stream, float]) -> str:
    if folding.config.value_output == "identity":
        return "W_V and W_O are the identity: only the activation's constants are merged"
    if index == 0:
        return "the first block reads the embedding, which stays as it is"
    if not folding.config.hidden:
        return "attention-only: the block before has no W_2, and its W_O is merged in"
    if not conditions:
        return "none of the allowed matrices is square"
    best = min(conditions, key=conditions.__getitem__)
    return f"W_{best[0].upper()} has condition number {conditions[best]:.1e}, over the limit"


def _size(block: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in block.modules() if isinstance(layer, nn.Linear))
