"""The networks whose training steps are compared: this library's, and Hugging Face's of the same size, compiled."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from skipless.data.loader import Batch
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.training.config import OptimizerConfig, TrainConfig
from skipless.training.distributed import World
from skipless.training.optim.build import build_optimizer, use_tensor_rates
from skipless.training.trainer import TrainStep

_MIRRORED = {"mlp_init": "mirrored", "activation": "gelu"}
_IDENTITY = {**_MIRRORED, "value_output": "identity"}
MIRRORED = {"mirrored": _MIRRORED, "identity": _IDENTITY, "gain": {**_IDENTITY, "bias_gain": True}}
OURS = ("e-spa", "u-spa", "v-skipinit", "pre-ln", *MIRRORED)
THEIRS = ("llama", "gpt-neox", "llama-masked", "gpt-neox-masked")
VOCABULARY, RATE = 32_000, 1e-5


@dataclass(frozen=True)
class Shape:
    """A size of network and the batch it takes."""

    name: str
    depth: int
    width: int
    batch: int
    length: int
    vocabulary: int = VOCABULARY
    heads: int = 8

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.length

    def __str__(self) -> str:
        return f"{self.depth} blocks x {self.width}, {self.batch} x {self.length} tokens"


SHAPES = {
    "wikitext103": Shape("wikitext103", 36, 1024, 16, 512),
    "c4": Shape("c4", 32, 1024, 8, 2048),
    "narrow": Shape("narrow", 36, 512, 16, 512),
    "small": Shape("small", 36, 256, 32, 256, heads=4),
    "tiny": Shape("tiny", 6, 32, 2, 16, 64),
}


@dataclass(frozen=True)
class Run:
    """How all arms of one comparison run. whole: Hugging Face's networks compiled as one, or layer by layer."""

    device: torch.device
    compile: bool
    impl: str = "auto"
    optimizer: str = "adam"
    whole: bool = True

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Run":
        """From the command line; a CPU compiles nothing unless asked."""
        device = torch.device(options.device)
        compiles = device.type == "cuda" if options.compile is None else options.compile
        optimizer = getattr(options, "optimizer", "adam")
        return cls(device, compiles, options.impl, optimizer, options.hf_compile == "whole")


class HuggingFace(nn.Module):
    """A causal language model of transformers behind the call that a TrainStep makes: tokens and targets to a loss."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.loss = inner, _loss

    def forward(self, tokens: Tensor, *, targets: Tensor, layout: Layout | None = None) -> Tensor:
        return self.loss(self.inner(input_ids=tokens, use_cache=False).logits, targets)

    def compile_parts(self, whole: bool) -> None:
        """Compile in place: everything with the loss, or the loss and each layer by itself."""
        if whole:
            self.compile(dynamic=False)
            return
        self.loss = torch.compile(_loss, dynamic=False)
        lists = [module for module in self.modules() if isinstance(module, nn.ModuleList)]
        for layer in lists[0]:
            layer.compile(dynamic=False)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def network(arm: str, shape: Shape, run: Run) -> nn.Module:
    """The arm's network on the device, not compiled; Gaussian weights, which are quick to draw."""
    torch.manual_seed(0)
    if arm in THEIRS:
        return HuggingFace(_hugging_face(arm, shape, run.device))
    fields = {"width": shape.width, "depth": shape.depth, "length": shape.length, "heads": shape.heads}
    fields |= MIRRORED.get(arm, {})
    name = "e-spa" if arm in MIRRORED else arm
    config = preset(f"wikitext103/{name}", vocab_size=shape.vocabulary, init="gaussian", **fields)
    with run.device:
        return Transformer(config, impl=run.impl)


def _hugging_face(arm: str, shape: Shape, device: torch.device) -> nn.Module:
    """Llama with 8d² weights in its three MLP matrices, as two of 4d have; or GPT-NeoX. Tied embeddings, SDPA.

    "-masked" is transformers' own "sdpa", which in compiled code passes a dense mask (torch < 2.14). Otherwise the same
    function runs under a name for which transformers makes no mask, so that torch's quickest causal kernel serves.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.length,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if arm.startswith("llama"):
        config = LlamaConfig(intermediate_size=round(8 * shape.width / 48) * 16, **common)
    else:
        config = GPTNeoXConfig(intermediate_size=4 * shape.width, **common)
    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    attention = "sdpa" if arm.endswith("-masked") else "sdpa_causal"
    with device:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def compiled(model: nn.Module, run: Run) -> nn.Module:
    """The model, compiled in place: this library's block by block, as the trainer does."""
    if run.compile:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # where it would go on uncompiled
        model.compile_blocks() if isinstance(model, Transformer) else model.compile_parts(run.whole)
    return model


def optimizer_of(model: nn.Module, run: Run) -> Optimizer:
    """The trainer's own for this library's networks; fused Adam over all parameters for others. Capturable on a GPU."""
    captured = run.device.type == "cuda"
    if isinstance(model, Transformer):
        settings = OptimizerConfig(run.optimizer, rate=RATE, embedding_rate=RATE)
        return build_optimizer(model, settings, capturable=captured)
    if run.optimizer != "adam":
        raise ValueError(f"optimizer is {run.optimizer!r}; Hugging Face's networks are measured with 'adam'")
    group = {"params": list(model.parameters()), "lr": RATE, "rate": RATE, "name": "all"}
    optimizer = Adam([group], lr=RATE, fused=True, capturable=captured)
    if captured:
        use_tensor_rates(optimizer)
    return optimizer


def train_step(model: nn.Module, shape: Shape, run: Run) -> TrainStep:
    """The trainer's step for a network: bfloat16 on a GPU, clipping at 0.1."""
    precision = "bf16" if run.device.type == "cuda" else "fp32"
    config = TrainConfig(steps=10**6, warmup=0, batch_size=shape.batch, length=shape.length, precision=precision)
    return TrainStep(model, optimizer_of(model, run), config, World(0, 1, run.device), clip=0.1, packed=False)


def batch_of(shape: Shape, run: Run) -> Batch:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)
    return Batch(tokens).to(run.device)


def flops_per_step(model: nn.Module, shape: Shape) -> float:
    """6 per entry of a matrix and token, the tied embedding counted once, and causal attention's 6·T·d per block."""
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    return shape.tokens * 6.0 * (matrices + shape.depth * shape.width * shape.length)
