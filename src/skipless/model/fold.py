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
would have to be rotated back for the values. Readers' W_V and W_O stay: what they give is added to the stream.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from skipless.files import parse_json, reading
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.nn.attention import ShapedAttention
from skipless.nn.block import MLP, Block
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import Skip

Stream = Literal["query", "key", "value"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
Weights = dict[str, Tensor]
_METADATA = "skipless.folding"
# A stream of condition number κ amplifies rounding by up to κ: at 1e4 in every block, logits at depth 36 keep 1e-9.
_LARGEST_CONDITION = 1e4


@torch.no_grad()
def fold(
    model: Transformer, *, max_condition: float | None = None, streams: Sequence[Stream] = STREAMS
) -> "FoldedTransformer":
    """The same function with fewer matrices; its `report` says what was merged. The model given is left alone.

    max_condition bounds the condition number of a matrix that may become the stream. None is 1/√ε of the weights'
    dtype, which costs at most half its digits, and no more than 1e4 (float32: 2896, float16: 32, bfloat16: 11).
    streams restricts which of "query", "key" and "value" may: ("query",) is the classical fold, () only merges W_O.

    Products are computed in float64 and rounded once to the weights' dtype. Models with norms or skips are refused.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"fold takes a skipless.Transformer, not a {type(model).__name__}; of an export, its .model")
    if isinstance(model, FoldedTransformer):
        raise ValueError("this model is folded already; fold the Transformer it came from")
    if bad := [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]:
        raise ValueError(f"{bad[0]} holds NaN or ∞, and so would everything it is merged into; load good weights")
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
    found: dict[Stream, float] = {}
    for name in foldable_streams(model.config):
        if name in streams:
            values = torch.linalg.svdvals(_exact(getattr(_attention(model.blocks[index]), name).weight))
            found[name] = float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
    return found


def _best(conditions: dict[Stream, float], limit: float) -> Stream | None:
    best = min(conditions, key=conditions.__getitem__, default=None)
    return best if best is not None and conditions[best] <= limit else None


@dataclass(frozen=True)
class Folding:
    """What a folded model is made of, as plain data: the configuration it came from and each block's stream.

    streams[l] names the product that block l no longer computes because the block before it hands it over ready-made,
    or None where all three are still computed. Everything else that folds follows from the configuration.
    """

    config: ModelConfig
    streams: tuple[Stream | None, ...]

    def __post_init__(self):
        check_foldable(self.config)
        object.__setattr__(self, "streams", tuple(self.streams))
        if len(self.streams) != self.config.depth:
            raise ValueError(f"{len(self.streams)} streams for depth={self.config.depth}; give one per block")
        possible = foldable_streams(self.config)
        for index, stream in enumerate(self.streams):
            allowed = possible if index else ()
            if stream is not None and stream not in allowed:
                names = ", ".join(map(repr, (*allowed, None)))
                raise ValueError(f"block {index} has stream {stream!r}; here it can be one of {names}")

    @property
    def activation(self) -> ShapedActivation:
        """φ, which is left of φ̂ when its constants are in the weights."""
        shaped = self.config.shaped_activation
        return ShapedActivation(shaped.base, negative_slope=shaped.negative_slope)

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP has biases: also without any in the configuration, when the activation's shifts need them."""
        shaped = self.config.shaped_activation
        return self.config.mlp_bias or shaped.input_shift != 0.0 or shaped.output_shift != 0.0

    def keeps_output(self, index: int) -> bool:
        """Whether block `index` still has W_O: that of readers, and the last of an attention-only model, which has no
        matrix behind.

        Where W_O is the identity it is nowhere.
        """
        return bool(self.config.readers) or (not self.config.hidden and index == self.config.depth - 1)

    def to_dict(self) -> dict[str, Any]:
        return {"config": self.config.to_dict(), "streams": list(self.streams)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Folding":
        return cls(ModelConfig.from_dict(data["config"]), tuple(data["streams"]))


def check_foldable(config: ModelConfig) -> None:
    """Refuse what does not fold: between two matrices that merge there may be neither a norm nor a skip."""
    found = []
    if config.norm != "none":
        found.append(f"norm={config.norm!r} (an RMSNorm between the matrices, which it does not commute with)")
    skips = {"attention_skip": config.attention_skip, **({"mlp_skip": config.mlp_skip} if config.hidden else {})}
    for name, skip in skips.items():
        if skip.shortcut != 0.0:
            found.append(f"{name}.shortcut={skip.shortcut} (the stream is also needed unmixed, so nothing is saved)")
    if not config.hidden and config.value_output == "identity":
        raise ValueError(
            "hidden=0 with value_output='identity': a block has W_Q and W_K alone, and there is nothing to merge; use "
            "the model as it is"
        )
    if found:
        raise ValueError(
            f"this model cannot be folded: {' and '.join(found)}. Only vanilla models fold, with norm='none' and "
            "Skip() around attention and MLP; such a model has to be trained as one, e.g. preset('wikitext103/e-spa')"
        )


def foldable_streams(config: ModelConfig) -> tuple[Stream, ...]:
    """Which of W_Q, W_K, W_V are square, and have an MLP before them to go into; none where values are the stream."""
    if not config.hidden or config.value_output == "identity":
        return ()
    return STREAMS if config.kv_heads == config.heads else ("query",)


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
            _merge_mlp(weights, folding.config.shaped_activation)
            following = folding.streams[index + 1] if index + 1 < len(folding.streams) else None
            if following is not None:  # the matrix that makes this block's output the next one's stream
                basis = _exact(getattr(_attention(model.blocks[index + 1]), following).weight)
                weights["down"], weights["down_bias"] = basis @ weights["down"], basis @ weights["down_bias"]
        elif not folding.keeps_output(index):
            carried = weights.pop("output")
        yield weights


def _read(block: Block) -> Weights:
    """A block's matrices and biases in float64, with the sub-blocks' residual weights multiplied in.

    Those of readers' values are left out: nothing is merged with them.
    """
    attention = _attention(block)
    names = ("query", "key") if attention.options.readers else (*STREAMS, "output")
    layers = {name: getattr(attention, name) for name in names}
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


@dataclass(frozen=True)
class BlockFold:
    """One block's weights before and after, and what became of its stream.

    conditions holds the condition number of each matrix that was tried; why_not says why none was taken.
    """

    weights_before: int
    weights_after: int
    stream: str | None
    conditions: Mapping[Any, float]
    why_not: str | None = None

    @property
    def saved(self) -> float:
        """The fraction of the block's weights that is gone."""
        return 1.0 - self.weights_after / self.weights_before


@dataclass(frozen=True)
class FoldReport:
    """Weights are the entries of the blocks' matrices: no embedding, biases or gains. str() is a table."""

    blocks: tuple[BlockFold, ...]
    max_condition: float
    dtype: torch.dtype

    @property
    def weights_before(self) -> int:
        return sum(block.weights_before for block in self.blocks)

    @property
    def weights_after(self) -> int:
        return sum(block.weights_after for block in self.blocks)

    @property
    def saved(self) -> float:
        """The fraction of all block weights that is gone."""
        return 1.0 - self.weights_after / self.weights_before

    @property
    def rounding(self) -> float:
        """u·κ, u the dtype's unit roundoff and κ the largest condition number folded (1 if none).

        The largest relative error that rounding the stream can put into one block's queries, keys or values.
        """
        folded = [block.conditions[block.stream] for block in self.blocks if block.stream is not None]
        return torch.finfo(self.dtype).eps / 2 * max(folded, default=1.0)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{len(self.blocks)} blocks: {self.weights_before:,} weights -> {self.weights_after:,} (-{self.saved:.1%})",
            f"{dtype}: relative rounding up to {self.rounding:.1e} per block; condition numbers up to "
            f"{self.max_condition:.1e} allowed",
            "block  saved  stream  condition",
        ]
        for index, block in enumerate(self.blocks):
            stream = block.stream or "-"
            condition = f"{block.conditions[block.stream]:.1e}" if block.stream else f"({block.why_not})"
            lines.append(f"{index:5d}  {block.saved:5.1%}  {stream:6s}  {condition}")
        return "\n".join(lines)


class FoldedTransformer(Transformer):
    """A Transformer whose blocks lack W_O, φ̂'s constants and, where `folding` says so, one of W_Q, W_K and W_V.

    It is called as a Transformer is, caches and layouts included; keys and values in a cache are those of the unfolded
    model. Its parameters require no gradient: training belongs to the unfolded model, since a step in merged matrices
    is a step of another network. `config` is the unfolded model's. Built by hand it holds no meaningful weights:
    `fold` and `load` fill it. `report` is fold's account of what it did, and None in a model that was loaded.
    """

    report: FoldReport | None = None

    def __init__(self, folding: Folding, *, impl: str = "auto"):
        super().__init__(folding.config, impl=impl)
        self.folding = folding
        for index, stream in enumerate(folding.streams):
            self.blocks[index] = _folded_block(_attention(self.blocks[index]), folding, index, stream)
        self.requires_grad_(False).eval()

    def reset_parameters(self) -> None:
        """Nothing: merged weights have no initialisation of their own."""

    @classmethod
    def empty(cls, folding: Folding, *, impl: str = "auto") -> "FoldedTransformer":
        """The model on the meta device, to be filled by load_state_dict(…, assign=True)."""
        with torch.device("meta"):
            return cls(folding, impl=impl)

    def save(self, path: str | Path) -> None:
        """One safetensors file, with the folding as JSON in its metadata under "skipless.folding"."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path, {"format": "pt", _METADATA: json.dumps(self.folding.to_dict())})

    @classmethod
    def load(cls, path: str | Path, *, impl: str = "auto", device: str = "cpu") -> "FoldedTransformer":
        """The model that `save` wrote, in the dtype it was saved in."""
        with reading(path, "fold the network again"):
            with safe_open(path, framework="pt", device=device) as file:
                text = (file.metadata() or {}).get(_METADATA)
                if text is None:
                    raise ValueError(
                        f"{path} has no {_METADATA!r} metadata; only what FoldedTransformer.save wrote loads here"
                    )
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            model = cls.empty(Folding.from_dict(parse_json(text)), impl=impl)
            model.load_state_dict(state, assign=True)
            return model


def _folded_block(attention: ShapedAttention, folding: Folding, index: int, stream: Stream | None) -> Block:
    config = folding.config
    output = None if folding.keeps_output(index) else "output"
    for gone in (stream, output):
        if gone is not None:
            setattr(attention, gone, nn.Identity())
    mlp = MLP(config.width, config.hidden, folding.activation, folding.mlp_bias) if config.hidden else None
    return Block.build(attention, mlp, config.width, (Skip(), Skip()), "none")


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
        return "values are the stream itself: only the activation's constants are merged"
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
