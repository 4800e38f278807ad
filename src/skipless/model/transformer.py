"""The transformer."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from skipless.model.config import ModelConfig, attention_shapes, mlp_gain
from skipless.model.presets import configuration
from skipless.nn import init
from skipless.nn.attention import AttentionOptions, LayerCache, ShapedAttention
from skipless.nn.block import MLP, Block
from skipless.nn.patches import PatchEmbedding
from skipless.nn.position import Positions
from skipless.ops.attention import Rotation
from skipless.ops.bias import BiasVectors
from skipless.ops.cross_entropy import linear_cross_entropy
from skipless.ops.layout import PADDING, Layout
from skipless.ops.linear import is_plain_linear
from skipless.ops.modes import is_readable
from skipless.theory.shapes import AttentionShape


class Transformer(nn.Module):
    """Decoder-only language model (head "lm"), or an encoder with a token or pooled head. Sec. 2, App. H.

    tokens (batch, T) of integers → logits (batch, T, vocab_size); (batch, T, classes) for a token head and
    (batch, classes) for a pooled one; with targets the loss. Packed or padded batches come with a Layout. A network of
    images takes them in place of tokens: (batch, channels, side, side) of pixels from 0 to 255.

    config may be a preset's name, and fields of it may be changed: Transformer("wikitext103/e-spa", depth=12).

    recompute, where set, runs each block as recompute(block, *arguments): activation checkpointing, by
    functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False).
    label_smoothing: share of the target that a pooled head's loss spreads over all classes, in training mode alone.
    tokenizer turns text into tokens and back (encode, decode, end) for `generate`; skipless.load attaches a run's own.
    """

    tokenizer: Any = None

    def __init__(self, config: ModelConfig | str, *, impl: str = "auto", **changes: Any):
        super().__init__()
        if changes or not isinstance(config, ModelConfig):
            config = configuration(config, **changes)
        self.config = config
        self.embedding = _embedding(config)
        options = AttentionOptions(
            position=config.position,
            bias_gain=config.bias_gain,
            value_gain_per_head=getattr(config.scheme, "per_head", False),
            value_output=config.value_output,
            readers=config.readers,
            impl=impl,
        )
        with torch.device("cpu"):  # a scheme of one's own may compute in torch, also where a model is built elsewhere
            shapes = attention_shapes(config)
        self.blocks = nn.ModuleList(_block(config, shape, options) for shape in shapes)
        self.norm = nn.RMSNorm(config.width, eps=1e-6) if config.norm == "pre" else nn.Identity()
        self.head = _head(config)
        self.embedding_scale = math.sqrt(config.width) if config.scales_embedding else 1.0
        self.recompute: Callable[..., Tensor] | None = None
        self.label_smoothing = 0.0
        self.reset_parameters()
        self.build_shapes()

    def forward(
        self,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        layout: Layout | None = None,
        caches: Sequence[LayerCache] | None = None,
        past: int = 0,
    ) -> Tensor:
        """Logits, or with targets their mean cross entropy, for which all logits never exist at once.

        inputs_embeds (batch, T, width) are taken in place of the embedding's rows, and tokens left out.
        With caches (one per block, holding `past` locations) the tokens follow those already seen.
        """
        hidden = self.hidden(tokens, inputs_embeds=inputs_embeds, layout=layout, caches=caches, past=past)
        return self.logits(hidden, layout) if targets is None else self.loss(hidden, targets, layout)

    def hidden(
        self,
        tokens: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        layout: Layout | None = None,
        caches: Sequence[LayerCache] | None = None,
        past: int = 0,
    ) -> Tensor:
        """X_L, the last block's output after the final norm where there is one: (batch, T, width)."""
        if caches is not None and layout is None:
            _check_past(caches, past)
        x = self.embed(tokens, inputs_embeds)
        layout = self.prepare(x, layout, past, cached=caches is not None)
        positions = self.positions(x, layout, past)
        for index, block in enumerate(self.each_block()):
            cache = caches[index] if caches is not None else None
            x = block(x, positions, cache) if self.recompute is None else self.recompute(block, x, positions, cache)
        return self.norm(x)

    def generate(self, prompt: str | Tensor, max_new_tokens: int = 100, **options: Any) -> Any:
        """The prompt and its continuation: text as text, by self.tokenizer; tokens (batch, T) as tokens.

        Greedy unless options say otherwise: sampling=Sampling(0.8), seed=1, stop=…; see skipless.generate.
        """
        from skipless.model.generate import generate, generate_text, refuse_loose_sampling

        refuse_loose_sampling(options)
        if isinstance(prompt, str):
            return generate_text(self, prompt, max_new_tokens, **options)
        return generate(self, prompt, max_new_tokens, **options)

    def prepare(self, x: Tensor, layout: Layout | None = None, past: int = 0, *, cached: bool = False) -> Layout | None:
        """Build what compiled blocks cannot: every block's bias vectors, and what a GPU needs of the layout.

        x (batch, T, width) follows `past` locations. Returns the layout to hand to the blocks; cheap when all exists.
        """
        if x.is_cuda and not cached:
            layout = next(self.each_block()).layers()[0].prepare(x, layout)
        self.bias_vectors(past + x.shape[1] if layout is None else layout.extent or x.shape[1], x)
        return layout

    def bias_vectors(self, length: int, like: Tensor) -> list[BiasVectors]:
        """Every block's, for `length` locations and tensors `like` this.

        Blocks may replace them for another length: a CUDA graph that reads them has to hold what is returned.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        devices = [next((p.device for p in block.parameters()), like.device) for block in self.each_block()]
        blocks = zip(self.each_block(), devices, strict=True)
        return [block.layers()[0].bias(length, device, dtype) for block, device in blocks]

    def build_shapes(self, length: int | None = None) -> None:
        """Build every block's bias vectors now, for `length` locations (None: the training length).

        torch.compile(fullgraph=True) and torch.export trace a forward that reads them and cannot build them. Tables,
        which are T×T and of one length where attention is not causal, are built when a length is named or first used.
        """
        blocks = [block for block in self.each_block() if not any(p.is_meta for p in block.parameters())]
        compact = not any(block.layers()[0].shape.tabled for block in blocks)
        if len(blocks) == len(self.blocks) and (compact or length is not None):
            self.bias_vectors(length or self.config.length, self.embedding.weight)

    def compile_blocks(self) -> "Transformer":
        """Compile each block in place, with static shapes. All blocks of a network share one graph."""
        for block in self.each_block():
            block.compile(dynamic=False)
        return self

    def each_block(self) -> Iterator[Block]:
        return iter(cast(Iterable[Block], self.blocks))

    def embed(self, tokens: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
        """X_0: the looked-up rows, or those given in their place, times √d where the stream starts at unit norm."""
        if (tokens is None) == (inputs_embeds is None):
            raise ValueError("give either tokens (batch, T) or inputs_embeds (batch, T, width), one of the two")
        _check_stream(tokens, inputs_embeds, self.config)
        rows = self.embedding(tokens) if inputs_embeds is None else inputs_embeds
        return rows * self.embedding_scale if self.embedding_scale != 1.0 else rows

    def positions(self, tokens: Tensor, layout: Layout | None = None, past: int = 0) -> Positions:
        """What all blocks share about where the tokens, (batch, T) or their rows (batch, T, width), stand.

        Patches of images turn by their row and column. At the start of SPA, W_Q = 0, that changes no kernel.
        """
        if self.config.position != "rope":
            return Positions(layout)
        width, images = self.config.width // self.config.heads, self.config.images
        if images is not None:
            return Positions(layout, Rotation.on_grid(images.grid, width, self.config.rope_base, tokens.device))
        if layout is not None:
            locations = layout.query_locations
        else:
            locations = torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
        return Positions(layout, Rotation.at(locations, width, self.config.rope_base))

    def logits(self, hidden: Tensor, layout: Layout | None = None) -> Tensor:
        """The unscaled unembedding X_L Eᵀ, whose logits have unit variance at initialisation; or the head's."""
        if self.head is None:
            return nn.functional.linear(hidden, self.embedding.weight.to(hidden.dtype))
        return self.head(_mean_over_tokens(hidden, layout) if self.config.head == "pooled" else hidden)

    def loss(self, hidden: Tensor, targets: Tensor, layout: Layout | None = None) -> Tensor:
        """Mean cross entropy of logits(hidden, layout) in nats; targets (batch, T), or (batch,) for a pooled head.

        Tokens that the layout calls padding are not counted, and their targets may be any number, such as −100.
        """
        pooled = self.config.head == "pooled"
        smoothing = self.label_smoothing if pooled and self.training else 0.0
        documents = None if layout is None else layout.query_documents
        counted = None if pooled or documents is None else (documents != PADDING).expand(targets.shape)
        head = self.embedding if self.head is None else self.head
        if smoothing or (head is self.head and not is_plain_linear(head)):
            return _dense_loss(self.logits(hidden, layout), targets, counted, smoothing)
        if documents is None:
            check_ids("targets", targets, len(head.weight))
        rows = _mean_over_tokens(hidden, layout) if pooled else hidden
        bias = None if self.head is None else self.head.bias
        return linear_cross_entropy(rows, head.weight, targets, bias, counted=counted)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter as the configuration says. App. H."""
        config, orthogonal = self.config, self.config.init == "orthogonal"
        for table in self.embedding.parameters():
            table.normal_(0.0, config.width**-0.5)
        mirrored = config.mlp_init == "mirrored"
        gain = mlp_gain(config) if config.hidden and not mirrored else 1.0
        streams = config.heads if config.scheme.by_head else 1
        for block in self.each_block():
            block.reset_parameters()
            attention, mlp = block.layers()
            attention.reset_parameters(config.query_key or "normal", orthogonal, config.query_key_scale)
            if mlp is not None:
                mlp.reset_mirrored(streams) if mirrored else mlp.reset_parameters(gain, orthogonal)
        if isinstance(self.norm, nn.RMSNorm):
            self.norm.reset_parameters()
        if self.head is not None:
            init.gaussian_(self.head.weight)
            if self.head.bias is not None:
                nn.init.zeros_(self.head.bias)


def _block(config: ModelConfig, shape: AttentionShape, options: AttentionOptions) -> Block:
    attention = ShapedAttention(config.width, config.heads, shape, config.kv_heads, options)
    mlp = MLP(config.width, config.hidden, config.shaped_activation, config.mlp_bias) if config.hidden else None
    return Block.build(attention, mlp, config.width, (config.attention_skip, config.mlp_skip), config.norm)


def _embedding(config: ModelConfig) -> nn.Embedding | PatchEmbedding:
    """What makes rows of tokens, or of the patches of images."""
    images = config.images
    if images is None:
        return nn.Embedding(config.vocab_size, config.width)
    return PatchEmbedding(images.patch, images.grid, config.width, images.mean, images.std)


def _head(config: ModelConfig) -> nn.Linear | None:
    """What stands behind the last block: None is the embedding's own matrix."""
    if config.head != "lm":
        return nn.Linear(config.width, config.classes)
    return None if config.tied_head else nn.Linear(config.width, config.vocab_size, bias=False)


def _dense_loss(logits: Tensor, targets: Tensor, counted: Tensor | None, smoothing: float) -> Tensor:
    """linear_cross_entropy of all logits, for label smoothing and for heads that are more than one matrix."""
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if counted is None:
        check_ids("targets", targets, logits.shape[-1])
        return nn.functional.cross_entropy(rows, targets.flatten().long(), label_smoothing=smoothing)
    real = targets.masked_fill(~counted, 0).flatten().long()
    losses = nn.functional.cross_entropy(rows, real, reduction="none").masked_fill(~counted.flatten(), 0.0)
    return losses.sum() / counted.sum().clamp(min=1)


def check_ids(name: str, ids: Any, size: int) -> None:
    """Refuse what does not number rows of a table of `size`. Values on a GPU are not waited for, only their dtype."""
    if not isinstance(ids, Tensor):
        raise ValueError(f"{name} are {type(ids).__name__}; they must be a tensor of torch.int64: torch.as_tensor(…)")
    if ids.dtype not in (torch.int64, torch.int32):
        way = "" if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool else f": {name}.long()"
        raise ValueError(f"{name} are {ids.dtype}; they must be whole numbers in torch.int64 or torch.int32{way}")
    if not is_readable(ids) or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if name == "targets" and low < 0:
        raise ValueError(
            f"targets run from {low} to {high}; they must lie in 0 … {size - 1}, and none is ignored but where a "
            "Layout has padding. To leave others out: torch.nn.functional.cross_entropy of the logits, model(tokens)"
        )
    if low < 0 or high >= size:
        raise ValueError(f"{name} run from {low} to {high}; the model knows 0 … {size - 1}: is this its tokenizer?")


def _check_stream(tokens: Tensor | None, inputs_embeds: Tensor | None, config: ModelConfig) -> None:
    width = config.width
    if tokens is not None and config.images is None:
        check_ids("tokens", tokens, config.vocab_size)
        if tokens.dim() != 2:
            raise ValueError(
                f"tokens are shaped {tuple(tokens.shape)}; they must be (batch, T): tokens[None] for one row"
            )
        if not torch.compiler.is_compiling() and not tokens.numel():
            raise ValueError(f"tokens are shaped {tuple(tokens.shape)}; give at least one row of one token")
    if not isinstance(inputs_embeds, Tensor | None):
        raise ValueError(
            f"inputs_embeds are a {type(inputs_embeds).__name__}; they must be a tensor (batch, T, {width})"
        )
    if inputs_embeds is not None and (inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != width):
        raise ValueError(f"inputs_embeds are shaped {tuple(inputs_embeds.shape)}; they must be (batch, T, {width})")
    if inputs_embeds is not None and config.images is not None and inputs_embeds.shape[1] != config.length:
        raise ValueError(
            f"inputs_embeds have {inputs_embeds.shape[1]} locations, and an image of this network {config.length}"
        )


def _check_past(caches: Sequence[LayerCache], past: int) -> None:
    """Caches that count what they hold must hold `past` locations: else tokens are rotated and weighed out of place."""
    held = getattr(caches[0], "length", past)
    if held != past:
        raise ValueError(f"past is {past} and the cache holds {held} locations: give past={held}, or use decode(…)")


def _mean_over_tokens(hidden: Tensor, layout: Layout | None) -> Tensor:
    if layout is None or layout.query_documents is None:
        return hidden.mean(dim=1)
    real = (layout.query_documents >= 0).to(hidden.dtype)[:, :, None]
    return (hidden * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
