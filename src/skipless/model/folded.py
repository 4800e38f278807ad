"""FoldedTransformer: a vanilla transformer with fewer matrices, for inference. `fold` makes one; a file restores it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from skipless.model.config import ModelConfig
from skipless.model.fold_report import FoldReport
from skipless.model.transformer import Transformer
from skipless.nn.attention import ShapedAttention
from skipless.nn.block import Block
from skipless.nn.mlp import MLP
from skipless.theory.activations import ShapedActivation
from skipless.theory.propagation import Skip

Stream = Literal["query", "key", "value"]
STREAMS: tuple[Stream, ...] = get_args(Stream)

_METADATA = "skipless.folding"


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
    def shaped(self) -> ShapedActivation:
        """φ̂, whose constants go into the weights."""
        return cast(ShapedActivation, self.config.activation)

    @property
    def activation(self) -> ShapedActivation:
        """φ, which is left of it."""
        return ShapedActivation(self.shaped.base, negative_slope=self.shaped.negative_slope)

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP has biases: also without any in the configuration, when the activation's shifts need them."""
        return self.config.mlp_bias or self.shaped.input_shift != 0.0 or self.shaped.output_shift != 0.0

    def keeps_output(self, index: int) -> bool:
        """Whether block `index` still has W_O: only the last of an attention-only model, which has no matrix behind.

        Where W_O is the identity it is nowhere.
        """
        return not self.config.hidden and index == self.config.depth - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"config": self.config.to_dict(), "streams": list(self.streams)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Folding":
        """The inverse of to_dict."""
        return cls(ModelConfig.from_dict(data["config"]), tuple(data["streams"]))


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
            attention = cast(ShapedAttention, cast(Block, self.blocks[index]).attention.inner)
            self.blocks[index] = _folded_block(attention, folding, index, stream)
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
        with safe_open(path, framework="pt", device=device) as file:
            text = (file.metadata() or {}).get(_METADATA)
            if text is None:
                raise ValueError(
                    f"{path} has no {_METADATA!r} metadata; only what FoldedTransformer.save wrote loads here"
                )
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        model = cls.empty(Folding.from_dict(json.loads(text)), impl=impl)
        model.load_state_dict(state, assign=True)
        return model


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


def _folded_block(attention: ShapedAttention, folding: Folding, index: int, stream: Stream | None) -> Block:
    config = folding.config
    output = None if folding.keeps_output(index) else "output"
    for gone in (stream, output):
        if gone is not None:
            setattr(attention, gone, nn.Identity())
    mlp = MLP(config.width, config.hidden, folding.activation, folding.mlp_bias) if config.hidden else None
    return Block.build(attention, mlp, config.width, (Skip(), Skip()), "none")
