"""The catalogue: small networks of many architectures, and faults to plant in a block of each."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention

ROWS, LENGTH, VOCABULARY = 3, 12, 64


@dataclass(frozen=True)
class Size:
    """Of a network: blocks of a stack, width and the seed of its weights."""

    depth: int = 6
    width: int = 32
    seed: int = 0
    heads: int = 4


@dataclass(frozen=True, eq=False)
class Case:
    """A network with a batch for it; stacks are the names of its lists of blocks."""

    model: nn.Module
    batch: Any
    stacks: tuple[str, ...]
    causal: bool = False

    def blocks(self, stack: str) -> list[tuple[str, nn.Module]]:
        """(name, module) of a stack's blocks."""
        return [(f"{stack}.{i}" if stack else i, b) for i, b in self.model.get_submodule(stack).named_children()]


def tokens(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed + 1))


def images(seed: int = 0, side: int = 16) -> Tensor:
    return torch.randn(ROWS, 3, side, side, generator=torch.Generator().manual_seed(seed))


_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _decoder(name: str, stack: str, **fields):
    def build(size: Size) -> Case:
        own = {
            "vocab_size": VOCABULARY,
            "hidden_size": size.width,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.heads,
            "intermediate_size": 2 * size.width,
            **_SPECIAL,
        } | {key: value(size) if callable(value) else value for key, value in fields.items()}
        config = transformers.AutoConfig.for_model(name, **own)
        return Case(transformers.AutoModelForCausalLM.from_config(config), tokens(size.seed), (stack,), True)

    return build


def _head_width(size: Size) -> int:
    return size.width // size.heads


def _bert(size: Size) -> Case:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        intermediate_size=2 * size.width,
        max_position_embeddings=32,
    )
    return Case(transformers.BertForMaskedLM(config), tokens(size.seed), ("bert.encoder.layer",))


def _vit(size: Size) -> Case:
    config = transformers.ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        intermediate_size=2 * size.width,
        image_size=16,
        patch_size=4,
    )
    return Case(transformers.ViTForImageClassification(config), images(size.seed), ("vit.layers",))


def _t5(size: Size) -> Case:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=size.width,
        d_kv=_head_width(size),
        d_ff=2 * size.width,
        num_layers=size.depth,
        num_heads=size.heads,
        decoder_start_token_id=0,
    )
    ids = tokens(size.seed)
    batch = {"input_ids": ids, "decoder_input_ids": tokens(size.seed + 7)}
    return Case(transformers.T5ForConditionalGeneration(config), batch, ("encoder.block", "decoder.block"))


def _bart(size: Size) -> Case:
    sides = {f"{side}_{word}": value for side in ("encoder", "decoder") for word, value in
             {"layers": size.depth, "attention_heads": size.heads, "ffn_dim": 2 * size.width}.items()}  # fmt: skip
    config = transformers.BartConfig(vocab_size=VOCABULARY, d_model=size.width, max_position_embeddings=32, **sides)
    batch = {"input_ids": tokens(size.seed), "decoder_input_ids": tokens(size.seed + 7)}
    stacks = ("model.encoder.layers", "model.decoder.layers")
    return Case(transformers.BartForConditionalGeneration(config), batch, stacks)


def _clip(size: Size) -> Case:
    shared = {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width,
        "projection_dim": 16,
    }
    config = transformers.CLIPConfig(
        text_config={**shared, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 1},
        vision_config={**shared, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    batch = {"input_ids": tokens(size.seed), "pixel_values": images(size.seed)}
    stacks = ("text_model.encoder.layers", "vision_model.encoder.layers")
    return Case(transformers.CLIPModel(config), batch, stacks)


def _swin(size: Size) -> Case:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=size.width // 2, depths=[2, size.depth], num_heads=[2, 4], window_size=4
    )
    stacks = ("swin.encoder.layers.0.blocks", "swin.encoder.layers.1.blocks")
    return Case(transformers.SwinForImageClassification(config), images(size.seed, 32), stacks)


def _mamba(size: Size) -> Case:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=size.width, num_hidden_layers=size.depth, state_size=4, **_SPECIAL
    )
    return Case(transformers.MambaForCausalLM(config), tokens(size.seed), ("backbone.layers",), True)


def _xlnet(size: Size) -> Case:
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=size.width, n_layer=size.depth, n_head=size.heads, d_inner=2 * size.width
    )
    return Case(transformers.XLNetLMHeadModel(config), tokens(size.seed), ("transformer.layer",))


class _Embedded(nn.Module):
    """Tokens and learned positions before a torch encoder or decoder."""

    def __init__(self, body: nn.Module, width: int, swapped: bool = False):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(LENGTH, width))
        self.body, self.swapped, self.head = body, swapped, nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        x = x.transpose(0, 1) if self.swapped else x
        x = self.body(x, x) if isinstance(self.body, nn.Transformer) else self.body(x)
        return self.head(x.transpose(0, 1) if self.swapped else x)


def _torch_encoder(norm_first: bool, batch_first: bool):
    def build(size: Size) -> Case:
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 2 * size.width, 0.0, norm_first=norm_first, batch_first=batch_first
        )
        body = nn.TransformerEncoder(layer, size.depth, enable_nested_tensor=False)
        for parameter in body.parameters():  # layers of nn.TransformerEncoder start as copies of one
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        return Case(_Embedded(body, size.width, not batch_first), tokens(size.seed), ("body.layers",))

    return build


def _torch_both(size: Size) -> Case:
    body = nn.Transformer(size.width, size.heads, size.depth, size.depth, 2 * size.width, 0.0, batch_first=True)
    return Case(_Embedded(body, size.width), tokens(size.seed), ("body.encoder.layers", "body.decoder.layers"))


class HandAttention(nn.Module):
    """Softmax attention as people write it; `scale` and `override` are where faults are planted."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out_proj, self.heads, self.causal = nn.Linear(width, width, bias=False), heads, causal
        self.scaling = (width // heads) ** -0.5
        self.override: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT * self.scaling
        scores = scores if self.override is None else self.override(scores)
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return self.out_proj((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class HandBlock(nn.Module):
    """Pre-LN, with the batch second if `swapped`."""

    def __init__(self, size: Size, causal: bool, swapped: bool):
        super().__init__()
        self.norm1, self.norm2, self.swapped = nn.LayerNorm(size.width), nn.LayerNorm(size.width), swapped
        self.attention = HandAttention(size.width, size.heads, causal)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 2 * size.width), nn.ReLU(), nn.Linear(2 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.swapped else x
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x.transpose(0, 1) if self.swapped else x


class HandNetwork(nn.Module):
    """A stream (rows, T, width) or, swapped, (T, rows, width)."""

    def __init__(self, size: Size, causal: bool, swapped: bool):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, size.width), nn.Embedding(LENGTH, size.width)
        self.blocks = nn.ModuleList(HandBlock(size, causal, swapped) for _ in range(size.depth))
        self.norm, self.head, self.swapped = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY), swapped

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = x.transpose(0, 1) if self.swapped else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(0, 1) if self.swapped else x))


def _hand(causal: bool, swapped: bool):
    return lambda size: Case(HandNetwork(size, causal, swapped), tokens(size.seed), ("blocks",), causal)


class MixerBlock(nn.Module):
    """Mixes locations by a matrix instead of attention."""

    def __init__(self, width: int, length: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(length, 2 * length), nn.GELU(), nn.Linear(2 * length, length))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x).mT).mT
        return x + self.mlp(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, size.width), nn.Linear(size.width, VOCABULARY)
        self.blocks = nn.Sequential(*(MixerBlock(size.width, LENGTH) for _ in range(size.depth)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(input_ids)))


def _ours(**fields):
    def build(size: Size) -> Case:
        sizes = {"vocab_size": VOCABULARY, "width": size.width, "heads": size.heads, "depth": size.depth}
        return Case(Transformer(ModelConfig(**sizes, length=LENGTH, **fields)), tokens(size.seed), ("blocks",), True)

    return build


_USUAL = Skip(1.0, 1.0)
_GROUPED = {"num_key_value_heads": 2}
ARCHITECTURES: dict[str, Callable[[Size], Case]] = {
    "gpt2": _decoder("gpt2", "transformer.h", n_positions=32, n_inner=lambda s: 2 * s.width),
    "llama": _decoder("llama", "model.layers", **_GROUPED),
    "neox": _decoder("gpt_neox", "gpt_neox.layers"),
    "qwen3": _decoder("qwen3", "model.layers", **_GROUPED, head_dim=_head_width),
    "gemma2": _decoder("gemma2", "model.layers", **_GROUPED, head_dim=_head_width),
    "mixtral": _decoder("mixtral", "model.layers", **_GROUPED, num_local_experts=4),
    "mamba": _mamba,
    "bert": _bert,
    "xlnet": _xlnet,
    "t5": _t5,
    "bart": _bart,
    "clip": _clip,
    "vit": _vit,
    "swin": _swin,
    "torch-pre": _torch_encoder(True, True),
    "torch-post": _torch_encoder(False, False),
    "torch-both": _torch_both,
    "hand": _hand(False, False),
    "hand-causal": _hand(True, False),
    "hand-swapped": _hand(True, True),
    "mixer": lambda size: Case(Mixer(size), tokens(size.seed), ("blocks",)),
    "pre-ln": _ours(attention_skip=_USUAL, mlp_skip=_USUAL, norm="pre", activation="gelu", scheme=StandardAttention()),
    "e-spa": _ours(scheme=ExponentialSPA(repeat_rate=1 / VOCABULARY)),
}


def build(architecture: str | Callable[[Size], Case], size: Size | None = None) -> Case:
    """The network as it starts, in evaluation mode."""
    size = size or Size()
    torch.manual_seed(size.seed)
    case = (ARCHITECTURES[architecture] if isinstance(architecture, str) else architecture)(size)
    case.model.eval()
    return case


ROLES = {
    "query": (r"(^|\.)(q|query|q_proj)\.weight$", r"(^|\.)q$"),
    "key": (r"(^|\.)(k|key|k_proj)\.weight$", r"(^|\.)k$"),
    "value": (r"(^|\.)(v|value|v_proj)\.weight$", r"(^|\.)v$"),
    "output": (
        r"attn\.(c_proj|o_proj|out_proj)\.weight$",
        r"attention\.(dense|output\.dense|out_proj|o_proj|inner\.output)\.weight$",
        r"SelfAttention\.o\.weight$",
        r"rel_attn\.o$",
        r"mixer\.out_proj\.weight$",
        r"mix\.2\.weight$",
    ),
    "mlp_in": (
        r"mlp\.(c_fc|gate_proj|dense_h_to_4h|fc1|0|inner\.in)\.weight$",
        r"experts\.gate_up_proj$",
        r"(^|\.)(linear1|fc1|wi|layer_1|intermediate\.dense|intermediate|mlp\.inner\.w_in)\.weight$",
        r"mixer\.in_proj\.weight$",
        r"mlp\.(inner\.)?(first|up|hidden|in_proj|input)\.weight$",
    ),
    "mlp_out": (
        r"mlp\.(c_proj|down_proj|dense_4h_to_h|fc2|2|inner\.out)\.weight$",
        r"experts\.down_proj$",
        r"(^|\.)(linear2|fc2|wo|layer_2)\.weight$",
        r"^output\.dense\.weight$",
        r"mlp\.(inner\.)?(second|down|out_proj|output)\.weight$",
    ),
    "norm": (
        r"(ln_1|norm1|input_layernorm|layer_norm1|layernorm_before|self_attn_layer_norm)\.weight$",
        r"(layer\.0\.layer_norm|attention\.output\.LayerNorm|rel_attn\.layer_norm|norm)\.weight$",
    ),
}
_FUSED = {"c_attn": 1, "in_proj_weight": 0}  # the axis along which query, key and value stand


def parameter(block: nn.Module, role: str) -> tuple[str, Tensor] | None:
    """(name, the part of its data) of a block's parameter in a role, or None where it has none."""
    if role in ("query", "key", "value"):
        which = ("query", "key", "value").index(role)
        for name, values in block.named_parameters():
            word = next((word for word in _FUSED if word in name and values.dim() == 2), None)
            if word is not None:
                return name, values.data.chunk(3, dim=_FUSED[word])[which]
            if "query_key_value.weight" in name:
                heads = 4
                return name, values.data.view(heads, 3, -1, values.shape[-1])[:, which]
    for pattern in ROLES[role]:
        for name, values in block.named_parameters():
            if re.search(pattern, name):
                return name, values.data
    return None


@dataclass(frozen=True, eq=False)
class Fault:
    """plant(case, stack, at) puts it into block `at` (from 0) of a stack and gives words of the cause, one of which
    must be in the verdict or the advice; None where the architecture has no place for it. `whole`: of the network.
    `noted`: a note names it, since it may be meant or no signal is lost."""

    plant: Callable[[Case, str, int], tuple[str, ...] | None]
    whole: bool = False
    fixed: int | None = None
    noted: bool = False


def _of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _like(out: Any, new: Tensor) -> Any:
    return new if isinstance(out, Tensor) else type(out)((new, *out[1:]))


def swapped(case: Case) -> bool:
    """Whether its stream is (T, rows, width)."""
    model = case.model
    return bool(getattr(model, "swapped", False)) or type(model).__name__.startswith("XLNet")


def stream(change: Callable[[Tensor], Tensor], *words: str) -> Fault:
    """Changes what a block gives, (rows, T, width)."""

    def plant(case: Case, stack: str, at: int):
        turn = swapped(case)

        def hook(module, args, out):
            x = _of(out)
            x = change(x.transpose(0, 1)).transpose(0, 1) if turn else change(x)
            return _like(out, x)

        case.blocks(stack)[at][1].register_forward_hook(hook)
        return words

    return Fault(plant)


def through(change: Callable[[Tensor, Tensor], Tensor], *words: str) -> Fault:
    """Changes what a block gives in view of what it read."""

    def plant(case: Case, stack: str, at: int):
        turn = swapped(case)

        def hook(module, args, kwargs, out):
            before = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
            x = _of(out)
            if turn:
                return _like(out, change(before.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1))
            return _like(out, change(before, x))

        case.blocks(stack)[at][1].register_forward_hook(hook, with_kwargs=True)
        return words

    return Fault(plant)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def inside(change: Callable[[Tensor], Tensor], words: tuple[str, ...], first: bool = True) -> Fault:
    """Changes what a block reads, inside its own forward."""

    def plant(case: Case, stack: str, at: int):
        if at == 0 and not first:
            return None
        block = case.blocks(stack)[at][1]
        forward = block.forward

        def changed(*args, **kwargs):
            if args:
                return forward(change(args[0]), *args[1:], **kwargs)
            return forward(**{**kwargs, "hidden_states": change(kwargs["hidden_states"])})

        block.forward = changed
        return words

    return Fault(plant)


def backward(factor: float, *words: str) -> Fault:
    """Multiplies the gradient that a block hands back to the one before it."""
    return inside(lambda x: _Backward.apply(x, factor), words)


def weights(role: str, change: Callable[[Tensor], None], *words: str, adjacent: int = 1) -> Fault:
    """Changes a parameter of a block, which is to be named."""

    def plant(case: Case, stack: str, at: int):
        blocks = case.blocks(stack)
        for _, block in blocks[at : at + adjacent]:
            found = parameter(block, role)
            if found is None:
                return None
            before = found[1].clone()
            with torch.no_grad():
                change(found[1])
            if torch.equal(before, found[1]):
                return None  # zero by design
        return words or (parameter(blocks[at][1], role)[0],)

    return Fault(plant)


def zero(values: Tensor) -> None:
    values.zero_()


def times(factor: float):
    return lambda values: values.mul_(factor)


def spoil(value: float):
    def change(values: Tensor) -> None:
        values[(0,) * values.dim()] = value

    return change


def norm_to(value: float):
    """A norm's weight so that it multiplies by `value`; Gemma's adds one to it."""

    def plant(case: Case, stack: str, at: int):
        found = parameter(case.blocks(stack)[at][1], "norm")
        if found is None:
            return None
        name, values = found
        with torch.no_grad():
            values.fill_(value - 1.0 if type(case.model).__name__.startswith("Gemma") else value)
        return (name,)

    return Fault(plant)


def dead_head(values: Tensor) -> None:
    """The first head of four."""
    first = values if values.dim() == 2 else values.flatten(0, -2)
    if values.dim() == 3 and values.shape[0] == 4:  # heads first
        values[0].zero_()
    else:
        first[: first.shape[0] // 4].zero_()


def _branch(case: Case, stack: str, at: int, words: tuple[str, ...]) -> nn.Module | None:
    block = case.blocks(stack)[at][1]
    for name, module in block.named_modules():
        if name.rpartition(".")[2] in words:
            inner = [getattr(module, each, None) for each in ("inner", "self")]  # without the shortcut around it
            return next((each for each in inner if each is not None), module)
    return None


_ATTENTION = ("attn", "attention", "self_attn", "SelfAttention", "mixer", "mix", "rel_attn")
_MLP = ("mlp", "DenseReluDense", "ff")


def branch(places: tuple[str, ...], change: Callable[[Tensor], Tensor], *words: str, first: bool = True) -> Fault:
    """Changes what the attention or the MLP of a block gives."""

    def plant(case: Case, stack: str, at: int):
        module = _branch(case, stack, at, places)
        if module is None:
            return None
        module.register_forward_hook(lambda m, args, out: _like(out, change(_of(out))))
        return words

    return Fault(plant)


def scores(change: Callable[[Tensor], Tensor], *words: str) -> Fault:
    """Changes the scores of a hand-written attention."""

    def plant(case: Case, stack: str, at: int):
        attention = getattr(case.blocks(stack)[at][1], "attention", None)
        if not isinstance(attention, HandAttention):
            return None
        attention.override = change
        return words

    return Fault(plant)


def never_on(case: Case, stack: str, at: int):
    block = case.blocks(stack)[at][1]
    found = parameter(block, "mlp_in")
    if found is None or not found[0].endswith(".weight"):
        return None
    name = found[0].replace(".weight", ".bias")
    bias = dict(block.named_parameters()).get(name)
    if bias is None:
        return None
    with torch.no_grad():
        bias.fill_(-1e3)
    return (name, found[0], "never", "no gradient")


def scaling(factor: float, *words: str):
    def plant(case: Case, stack: str, at: int):
        for module in case.blocks(stack)[at][1].modules():
            if isinstance(getattr(module, "scaling", None), float):
                module.scaling *= factor
                return words
        return None

    return Fault(plant)


def dead_expert(case: Case, stack: str, at: int):
    found = parameter(case.blocks(stack)[at][1], "mlp_out")
    if found is None or found[1].dim() != 3:
        return None
    found[1][1].zero_()
    return (found[0],)


def no_positions(case: Case, stack: str, at: int):
    if case.causal or isinstance(case.model, Mixer):
        return None
    names = [n for n, _ in case.model.named_parameters() if re.search(r"position|wpe", n) and "bias" not in n]
    if not names or len(case.stacks) > 1:
        return None
    for name in names:
        dict(case.model.named_parameters())[name].data.zero_()
    return ("position",)


def embedding(change: Callable[[Tensor], None], *words: str) -> Fault:
    def plant(case: Case, stack: str, at: int):
        table = next((m for m in case.model.modules() if isinstance(m, nn.Embedding)), None)
        if table is None or len(case.stacks) > 1:
            return None
        others = [p for n, p in case.model.named_parameters() if re.search("position|token_type|wpe", n)]
        with torch.no_grad():
            change(table.weight)
            for each in others:
                each.zero_()
        return words

    return Fault(plant, whole=True)


def everywhere(fault: Fault) -> Fault:
    """In every block of the stack: any of them may be named."""

    def plant(case: Case, stack: str, at: int):
        found = [fault.plant(case, stack, index) for index in range(len(case.blocks(stack)))]
        return None if None in found else found[0]

    return Fault(plant, fixed=0, whole=True)


def two(fault: Fault) -> Fault:
    """In a block and in the next."""

    def plant(case: Case, stack: str, at: int):
        if at + 1 >= len(case.blocks(stack)):
            return None
        words = fault.plant(case, stack, at)
        return None if words is None or fault.plant(case, stack, at + 1) is None else words

    return Fault(plant)


def _one_line(x: Tensor) -> Tensor:
    signs = torch.where(torch.arange(x.shape[1]) % 2 == 0, 1.0, -1.0).reshape(1, -1, *[1] * (x.dim() - 2))
    direction = x.flatten(1, -2).mean(1).reshape(len(x), *[1] * (x.dim() - 2), x.shape[-1])
    return F.normalize(direction, dim=-1) * x.norm(dim=-1, keepdim=True) * signs


def _channel(x: Tensor) -> Tensor:
    spike = torch.zeros(x.shape[-1])
    spike[3] = 300.0
    return x + spike * x.square().mean(-1, keepdim=True).sqrt()


def _half_zero(x: Tensor) -> Tensor:
    keep = (torch.arange(x.shape[1]) % 2).reshape(1, -1, *[1] * (x.dim() - 2))
    return x * keep


def _noise(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(x.shape, generator=generator)


def _shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(5))]


def _one_location(x: Tensor, value: float) -> Tensor:
    change = torch.zeros_like(x)
    change[0, 1] = value
    return x + change


def _causal_only(fault: Fault) -> Fault:
    return Fault(lambda case, stack, at: fault.plant(case, stack, at) if case.causal else None)


def _rows_apart(fault: Fault) -> Fault:
    return Fault(lambda case, stack, at: fault.plant(case, stack, at) if not swapped(case) else None)


def _with_shortcut(fault: Fault) -> Fault:
    """Only where blocks have shortcuts."""

    def plant(case: Case, stack: str, at: int):
        config = getattr(case.model, "config", None)
        if isinstance(config, ModelConfig) and config.norm == "none":
            return None
        return fault.plant(case, stack, at)

    return Fault(plant)


_TRIANGLE = torch.arange(LENGTH)
FAULTS: dict[str, Fault] = {
    "cut output": stream(lambda x: x.detach(), "detach"),
    "cut input": inside(lambda x: x.detach(), ("detach",), first=False),  # what enters the first may be frozen
    "nan": stream(lambda x: _one_location(x, math.nan), "not finite"),
    "inf": stream(lambda x: _one_location(x, math.inf), "not finite"),
    "scale down": stream(lambda x: x * 1e-3, "factor on its output", "drops"),
    "scale up": stream(lambda x: x * 1e3, "factor on its output", "jumps"),
    "all zero": stream(lambda x: x * 0.0, "zero"),
    "half zero": stream(_half_zero, "locations are zero", "locations of"),
    "mean of locations": stream(lambda x: x.mean(1, keepdim=True).expand_as(x) + 0 * x, "alike", "collapse"),
    "one line": stream(_one_line, "one line"),
    "channel": stream(_channel, "one channel", "channel"),
    "no shortcut": _with_shortcut(through(lambda before, x: x - before, "shortcut")),
    "noise": stream(_noise, "does not depend", "detach", "shortcut"),
    "shuffled": _with_shortcut(stream(_shuffled, "shortcut", "order")),
    "unchanged": through(lambda before, x: before + 0 * x if before.shape == x.shape else x, "unchanged"),
    "rows copied": stream(lambda x: x[:1].expand_as(x), "row"),
    "rows mixed": stream(lambda x: x + 0.5 * x.roll(1, 0), "row"),
    "future": _causal_only(stream(lambda x: x + 0.5 * x.roll(-1, 1), "future")),
    "gradient nan": backward(math.nan, "not finite"),
    "gradient zero": backward(0.0, "zero", "detach"),
    "gradient small": backward(1e-8, "vanish"),
    "gradient large": backward(1e8, "explode"),
    **{f"zero {role}": weights(role, zero) for role in ("query", "key", "value", "output", "mlp_in", "mlp_out")},
    **{f"large {role}": weights(role, times(100.0)) for role in ("query", "value", "output", "mlp_in", "mlp_out")},
    **{f"small {role}": weights(role, times(0.01)) for role in ("key", "value", "output", "mlp_out")},
    **{f"nan {role}": weights(role, spoil(math.nan)) for role in ("query", "mlp_out", "norm")},
    "inf value": weights("value", spoil(math.inf)),
    "zero norm": norm_to(0.0),
    "large norm": norm_to(100.0),
    "dead head": weights("value", dead_head),
    "dead expert": Fault(dead_expert),
    "never on": Fault(never_on),
    "attention zero": branch(_ATTENTION, lambda x: x * 0.0, "attn", "ttention", "mix", "branch", "all zero"),
    "attention cut": branch(_ATTENTION, lambda x: x.detach(), "no gradient", "detach"),
    "mlp zero": branch(_MLP, lambda x: x * 0.0, "mlp", "DenseReluDense", "ff.", "all zero"),
    "mlp cut": branch(_MLP, lambda x: x.detach(), "no gradient", "detach"),
    "saturated": scaling(1e4, "one location", "one key"),
    "flat": scaling(1e-12, "uniform", "q_proj", "q.weight", "query"),
    "sink": scores(lambda s: s + 1e4 * (_TRIANGLE == 0), "first"),
    "identity": scores(lambda s: s + 1e4 * torch.eye(LENGTH), "itself"),
    "no positions": Fault(no_positions, whole=True, noted=True),
    "embedding zero": embedding(zero, "batch itself", "embedding"),
    "embedding nan": embedding(times(math.nan), "embedding"),
    "two zero values": two(weights("value", zero)),
    "two zero mlp_out": two(weights("mlp_out", zero)),
    "two no shortcut": _with_shortcut(two(through(lambda before, x: x - before, "shortcut"))),
    "all zero values": everywhere(weights("value", zero)),
    "all cut": everywhere(stream(lambda x: x.detach(), "detach")),
    "all attention cut": everywhere(branch(_ATTENTION, lambda x: x.detach(), "no gradient", "detach")),
    "all scaled down": everywhere(stream(lambda x: x * 1e-3, "factor on its output", "drops")),
}
