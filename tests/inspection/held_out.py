"""A second catalogue, written before any of it was run: mistakes that people make, in networks of other architectures.

No rule and no threshold was chosen with these networks or these faults in view. What was found when they were first
run stands in docs/faults.md. `words` are the cause as it was expected then.
"""

import math
from collections.abc import Callable

import torch
import transformers
from tests.inspection.catalogue import (
    LENGTH,
    VOCABULARY,
    Case,
    Fault,
    Size,
    images,
    inside,
    through,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _sizes(size: Size) -> dict:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width,
    }


def _phi(size: Size) -> Case:
    """Attention and MLP side by side, biases, rotation of a part of each head."""
    config = transformers.PhiConfig(vocab_size=VOCABULARY, **_sizes(size), **_SPECIAL)
    return Case(transformers.PhiForCausalLM(config), tokens(size.seed), ("model.layers",), True)


def _olmo2(size: Size) -> Case:
    """Norms after the branches, and of queries and keys."""
    config = transformers.Olmo2Config(vocab_size=VOCABULARY, **_sizes(size), **_SPECIAL)
    return Case(transformers.Olmo2ForCausalLM(config), tokens(size.seed), ("model.layers",), True)


def _modernbert(size: Size) -> Case:
    """Local and global attention in turn, gated MLP, no norm before the first attention."""
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = transformers.ModernBertConfig(vocab_size=VOCABULARY, **_sizes(size), **ids)
    return Case(transformers.ModernBertForMaskedLM(config), tokens(size.seed), ("model.layers",))


def _dinov2(size: Size) -> Case:
    """Vision, with a factor per channel on each branch."""
    sizes = {name: value for name, value in _sizes(size).items() if name != "intermediate_size"}
    config = transformers.Dinov2Config(image_size=16, patch_size=4, mlp_ratio=2, **sizes)
    return Case(transformers.Dinov2ForImageClassification(config), images(size.seed), ("dinov2.encoder.layer",))


def _whisper(size: Size) -> Case:
    """Sound in, tokens out."""
    sides = {f"{side}_{word}": value for side in ("encoder", "decoder") for word, value in
             {"layers": size.depth, "attention_heads": size.heads, "ffn_dim": 2 * size.width}.items()}  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=size.width,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sides,
    )
    frames = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(size.seed))
    batch = {"input_features": frames, "decoder_input_ids": tokens(size.seed)}
    stacks = ("model.encoder.layers", "model.decoder.layers")
    return Case(transformers.WhisperForConditionalGeneration(config), batch, stacks)


class Attention(nn.Module):
    """One matrix for queries, keys and values, rotated by location."""

    def __init__(self, size: Size):
        super().__init__()
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.heads, self.dropout, self.still = size.heads, nn.Dropout(0.1), False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        angle = torch.arange(x.shape[1])[:, None] * 0.1 ** torch.arange(q.shape[-1] // 2)
        turn = torch.polar(torch.ones_like(angle), angle * (not self.still))
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2) for y in (q, k))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(x.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """As in the small GPTs that people write for themselves."""

    def __init__(self, size: Size):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.RMSNorm(size.width), Attention(size), nn.RMSNorm(size.width)
        self.gate, self.up = (nn.Linear(size.width, 2 * size.width, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(2 * size.width, size.width, bias=False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y = self.ln_2(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class GPT(nn.Module):
    """Its head is its embedding."""

    def __init__(self, size: Size):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.ln_f, self.lm_head = nn.RMSNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


ARCHITECTURES: dict[str, Callable[[Size], Case]] = {
    "phi": _phi,
    "olmo2": _olmo2,
    "modernbert": _modernbert,
    "dinov2": _dinov2,
    "whisper": _whisper,
    "gpt": lambda size: Case(GPT(size), tokens(size.seed), ("h",), True),
}


class Attending(TorchFunctionMode):
    """While open, torch's attention is done by `change(attend, q, k, v, seen, scale)` where queries see their own row;
    seen is what each may see, or None for everything."""

    def __init__(self, change: Callable[..., Tensor]):
        super().__init__()
        self.change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or args[0].shape[-2] != args[1].shape[-2]:
            return func(*args, **kwargs)
        (q, k, v), scale = args[:3], kwargs.get("scale") or args[0].shape[-1] ** -0.5
        seen = kwargs.get("attn_mask")
        if kwargs.get("is_causal"):
            seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        elif seen is not None and seen.is_floating_point():
            seen = seen > -1
        return self.change(func, q, k, v, seen, scale)


def attention(
    change: Callable[..., Tensor], causal: tuple[str, ...], otherwise: tuple[str, ...] | None, *, noted: bool = False
) -> Fault:
    """Attention of a block that is done in another way; `otherwise`: the words where a block may see what follows, or
    None where there the mistake cannot be made."""

    def plant(case: Case, stack: str, at: int):
        words = causal if case.causal or "decoder" in stack else otherwise
        if words is None:
            return None
        block = case.blocks(stack)[at][1]
        forward = block.forward

        def changed(*args, **kwargs):
            with Attending(change):
                return forward(*args, **kwargs)

        block.forward = changed
        return words

    return Fault(plant, noted=noted)


def _mixed(attend, q, k, v, seen, scale):
    """The result is viewed as (rows, T, width) without moving heads behind locations first."""
    out = attend(q, k, v, attn_mask=seen, scale=scale).contiguous()
    rows, heads, length, width = out.shape
    return out.view(rows, length, heads, width).transpose(1, 2)


def _over_queries(attend, q, k, v, seen, scale):
    scores = q @ k.mT * scale
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return torch.softmax(scores, -2) @ v


def _no_softmax(attend, q, k, v, seen, scale):
    scores = q @ k.mT * scale
    return (scores if seen is None else scores.masked_fill(~seen, 0.0)) @ v


def _wrong_sign(attend, q, k, v, seen, scale):
    return attend(q, k, v, attn_mask=~seen | torch.eye(q.shape[-2], dtype=torch.bool), scale=scale)


def _zeros_and_ones(attend, q, k, v, seen, scale):
    return attend(q, k, v, attn_mask=seen.to(q.dtype), scale=scale)


def _frozen(case: Case, stack: str, at: int):
    case.blocks(stack)[at][1].requires_grad_(False)
    return ("frozen", "requires_grad", "no gradient")


def _dropout(case: Case, stack: str, at: int):
    found = False
    for module in case.blocks(stack)[at][1].modules():
        if isinstance(module, nn.Dropout):
            module.p, found = 1.0, True
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout, found = 1.0, True
    return ("ropout",) if found else None


def _thirty(case: Case, stack: str, at: int):
    with torch.no_grad():
        for parameter in case.blocks(stack)[at][1].parameters():
            if parameter.dim() > 1:
                parameter.mul_(30.0)
    return ("larger",)


def _overflow(case: Case, stack: str, at: int):
    """Activations above 65504 behind a norm, in half precision."""
    norm = next(m for m in case.blocks(stack)[at][1].modules() if "Norm" in type(m).__name__)
    norm.register_forward_hook(lambda module, args, out: (out * 1e6).half().float())
    return ("not finite",)


def _no_epsilon(case: Case, stack: str, at: int):
    """A location that is zero, as of a token without meaning, before a norm that divides by its size."""
    for module in case.blocks(stack)[at][1].modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float) or (isinstance(module, nn.RMSNorm) and name == "eps"):
                setattr(module, name, 0.0)
    return inside(_zero_location, ("not finite",)).plant(case, stack, at)


def _zero_location(x: Tensor) -> Tensor:
    keep = torch.ones_like(x)
    keep[0, 1] = 0.0
    return x * keep


def _over_rows(case: Case, stack: str, at: int):
    """A block of another layout: rows are taken for locations."""
    if isinstance(case.model, transformers.PreTrainedModel) and not (
        stack == "model.encoder.layers" or "dinov2" in stack
    ):
        return None  # masks and rotations would not fit, and say so
    block = case.blocks(stack)[at][1]
    forward = block.forward

    def changed(x, *args, **kwargs):
        out = forward(x.transpose(0, 1), *args, **kwargs)
        return out.transpose(0, 1) if isinstance(out, Tensor) else (out[0].transpose(0, 1), *out[1:])

    block.forward = changed
    return ("row",)


def _loaded_twice(case: Case, stack: str, at: int):
    """A checkpoint converted with an index that is off by one."""
    blocks = case.blocks(stack)
    if at == 0 or blocks[at][1].state_dict().keys() != blocks[at - 1][1].state_dict().keys():
        return None
    blocks[at][1].load_state_dict(blocks[at - 1][1].state_dict())
    return ("same as", "copy", "equal", "identical")


def _one_position(case: Case, stack: str, at: int):
    """Every location is told that it is the first."""
    if isinstance(case.model, GPT):
        for module in case.model.modules():
            if isinstance(module, Attention):
                module.still = True
        return ("position",)
    for name, module in case.model.named_modules():
        if "rotary_emb" in name:
            module.register_forward_hook(lambda m, args, out: tuple(x[:, :1].expand_as(x) for x in out))
            return ("position",)
    for name, parameter in case.model.named_parameters():
        if "position" in name and ("encoder" not in name or "encoder" in stack) and "decoder" not in name:
            parameter.data.copy_(parameter.data.flatten(0, -2)[:1].expand_as(parameter))
            return ("position",)
    return None


def _untied(case: Case, stack: str, at: int):
    """A head that should share the embedding's weights and was given its own."""
    tables = {id(m.weight) for m in case.model.modules() if isinstance(m, nn.Embedding)}
    for module in case.model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in tables:
            module.weight = nn.Parameter(module.weight.detach().clone() + 0.01)
            return ("tied", "tie ", "share")
    return None


_SEES_FUTURE = ("future",)
FAULTS: dict[str, Fault] = {
    "scale forgotten": attention(
        lambda attend, q, k, v, seen, scale: attend(q, k, v, attn_mask=seen, scale=scale * q.shape[-1] ** 0.5),
        ("scale", "scores", "one location", "one key"),
        ("scale", "scores", "one location", "one key"),
    ),
    "heads mixed with locations": attention(_mixed, _SEES_FUTURE, ("location", "order", "mix")),
    "softmax over queries": attention(_over_queries, _SEES_FUTURE, ("softmax", "sum to", "attention"), noted=True),
    "no softmax": attention(
        _no_softmax, ("softmax", "attention", "attn"), ("softmax", "attention", "attn"), noted=True
    ),
    "mask of the wrong sign": attention(_wrong_sign, _SEES_FUTURE, None),
    "mask of zeros and ones": attention(_zeros_and_ones, _SEES_FUTURE, None),
    "keys and values detached": attention(
        lambda attend, q, k, v, seen, scale: attend(q, k.detach(), v.detach(), attn_mask=seen, scale=scale),
        ("no gradient", "detach"),
        ("no gradient", "detach"),
    ),
    "shortcut detached": through(lambda before, x: x - before + before.detach(), "detach", "shortcut"),
    "block frozen": Fault(_frozen, noted=True),
    "dropout of one": Fault(_dropout, noted=True),
    "drawn 30 times too large": Fault(_thirty),
    "overflow in half precision": Fault(_overflow),
    "norm without epsilon": Fault(_no_epsilon),
    "shortcut added twice": through(lambda before, x: x + before, "shortcut", "factor on its output", "jumps", "twice"),
    "norm on the shortcut": inside(
        lambda x: F.layer_norm(x, x.shape[-1:]), ("shortcut", "factor on its output", "jumps", "drops", "norm")
    ),
    "attention over rows": Fault(_over_rows),
    "block loaded twice": Fault(_loaded_twice, noted=True),
    "one position for all": Fault(_one_position, whole=True, fixed=0, noted=True),
    "head not tied": Fault(_untied, whole=True, fixed=0, noted=True),
}
assert LENGTH == 12  # the encoder of sound has 16 locations, so that attention across stacks is told apart
