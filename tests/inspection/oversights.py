"""A fifth catalogue, written when the rules for the fourth were done and before any of it was run.

It says what those rules are worth on mistakes and networks that nobody had in view. What was found when it was first
run stands in docs/faults.md. `words` are the cause as it was expected then. "scores scaled twice", "mask one too
wide" and "output not read" are kin to mistakes of the catalogues before.
"""

import math
from collections.abc import Callable

import torch
import transformers
from tests.inspection.catalogue import VOCABULARY, Case, Fault, Size, everywhere, images, stream, tokens
from tests.inspection.held_out import attention
from torch import Tensor, nn
from torch.nn import functional as F

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _sizes(size: Size) -> dict:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width,
    }


def _gemma(size: Size) -> Case:
    """Norms that add one to their weights, gated MLPs, an embedding times √width."""
    config = transformers.GemmaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=size.heads,
        head_dim=size.width // size.heads,
        **_sizes(size),
        **_SPECIAL,
    )
    return Case(transformers.GemmaForCausalLM(config), {"input_ids": tokens(size.seed)}, ("model.layers",), causal=True)


def _starcoder2(size: Size) -> Case:
    """Rotated, with biases everywhere."""
    config = transformers.Starcoder2Config(
        vocab_size=VOCABULARY, num_key_value_heads=size.heads, **_sizes(size), **_SPECIAL
    )
    model = transformers.Starcoder2ForCausalLM(config)
    return Case(model, {"input_ids": tokens(size.seed)}, ("model.layers",), causal=True)


def _roberta(size: Size) -> Case:
    """Post-LN, reads both ways."""
    config = transformers.RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **_sizes(size))
    return Case(transformers.RobertaForMaskedLM(config), {"input_ids": tokens(size.seed)}, ("roberta.encoder.layer",))


def _mbart(size: Size) -> Case:
    """Encoder and decoder, Pre-LN, a norm behind the embedding."""
    sides = {f"{side}_{word}": value for side in ("encoder", "decoder") for word, value in
             {"layers": size.depth, "attention_heads": size.heads, "ffn_dim": 2 * size.width}.items()}  # fmt: skip
    config = transformers.MBartConfig(
        vocab_size=VOCABULARY, d_model=size.width, max_position_embeddings=32, forced_eos_token_id=None, **sides
    )
    batch = {"input_ids": tokens(size.seed), "decoder_input_ids": tokens(size.seed + 7)}
    stacks = ("model.encoder.layers", "model.decoder.layers")
    return Case(transformers.MBartForConditionalGeneration(config), batch, stacks)


def _msn(size: Size) -> Case:
    """Vision, learned positions."""
    config = transformers.ViTMSNConfig(image_size=16, patch_size=4, **_sizes(size))
    return Case(transformers.ViTMSNModel(config), {"pixel_values": images(size.seed)}, ("layers",))


class CausalSelfAttention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.c_attn, self.c_proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(size.width), CausalSelfAttention(size)
        self.ln_2, self.mlp = nn.LayerNorm(size.width), MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """One page of GPT, as many write it."""

    def __init__(self, size: Size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, size.width), nn.Embedding(32, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.ln_f, self.lm_head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.depth) if last else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


ARCHITECTURES: dict[str, Callable[[Size], Case]] = {
    "gemma": _gemma,
    "starcoder2": _starcoder2,
    "roberta": _roberta,
    "mbart": _mbart,
    "msn": _msn,
    "nano": lambda size: Case(Nano(size), {"input_ids": tokens(size.seed)}, ("h",), causal=True),
}
_VALUE, _KEY = ("v_proj", "self.value"), ("k_proj", "self.key")
_OUTPUT = ("o_proj", "self_attn.out_proj", "attention.output.dense", "attn.c_proj")
_LAST = ("mlp.c_proj", "down_proj", "fc2", "output.dense")  # of the MLP, the last that fits


def _named(block: nn.Module, suffixes: tuple[str, ...]) -> tuple[str, nn.Module] | None:
    """The last module of a block whose name ends so; a decoder's attention to its encoder is left alone."""
    fits = [(n, m) for n, m in block.named_modules() if n.endswith(suffixes) and "encoder_attn" not in n]
    return fits[-1] if fits else None


def _norms(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in block.named_modules() if "Norm" in type(each).__name__]


def _values_are_keys(case: Case, stack: str, at: int):
    """v = self.key(x), copied from the line above."""
    block = case.blocks(stack)[at][1]
    value, key = _named(block, _VALUE), _named(block, _KEY)
    if value is None or key is None:
        return None
    value[1].forward = key[1].forward
    return (f"{value[0]}.weight", "no gradient")


def _norm_over_locations(case: Case, stack: str, at: int):
    """A norm over the axis of locations instead of that of channels."""
    _, norm = _norms(case.blocks(stack)[at][1])[0]
    norm.forward = lambda x: F.layer_norm(x.mT, x.shape[1:2]).mT
    return ("future", "locations", "norm")


def _one_matrix_frozen(case: Case, stack: str, at: int):
    """requires_grad_(False) on the wrong matrix."""
    found = _named(case.blocks(stack)[at][1], (*_VALUE, "c_attn"))
    if found is None:
        return None
    found[1].weight.requires_grad_(False)
    return ("frozen", "requires_grad", "learn", "no gradient")


def _drawn_by_default(case: Case, stack: str, at: int):
    """A block that was added later, and that the network's own initialisation never saw."""
    for module in case.blocks(stack)[at][1].modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return ("larger", "initialis", "drawn")


def _scaled_for_depth_twice(case: Case, stack: str, at: int):
    """The factor 1/√(2·depth) on the last matrices of branches, applied once more."""
    block, factor = case.blocks(stack)[at][1], (2 * len(case.blocks(stack))) ** -0.5
    for suffixes in (_OUTPUT, _LAST):
        found = _named(block, suffixes)
        if found is not None:
            found[1].weight.data.mul_(factor)
    return ("smaller", "scaled")


def _output_not_read(case: Case, stack: str, at: int):
    """block(x) in the loop instead of x = block(x)."""
    blocks = case.blocks(stack)
    if at + 1 >= len(blocks):
        return None
    read: list[Tensor] = []

    def keep(module, args, kwargs):
        read.append(args[0] if args else kwargs["hidden_states"])

    def give(module, args, kwargs):
        x = read.pop()
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    blocks[at][1].register_forward_pre_hook(keep, with_kwargs=True)
    blocks[at + 1][1].register_forward_pre_hook(give, with_kwargs=True)
    return ("not read", "unused", "nothing depends", "not used", "no gradient")


class _OverRows(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


def _batch_norm(case: Case, stack: str, at: int):
    """BatchNorm where a LayerNorm was meant; in evaluation mode, before any training, it does nothing."""
    block = case.blocks(stack)[at][1]
    for name, norm in _norms(block):
        around, _, own = name.rpartition(".")
        setattr(block.get_submodule(around), own, _OverRows(norm.weight.numel()).eval())
    return ("norm", "Norm")


def _activation_behind_the_mlp(case: Case, stack: str, at: int):
    """nn.Sequential(up, act, down, act): a branch that only adds what is positive."""
    found = _named(case.blocks(stack)[at][1], _LAST)
    if found is None:
        return None
    found[1].register_forward_hook(lambda module, args, out: F.relu(out))
    return ("negative", "activation")


def _gradient_scaled(case: Case, stack: str, at: int):
    """A factor on gradients that was meant for a front end, left on a block."""

    def hook(module, args, out):
        x = out if isinstance(out, Tensor) else out[0]
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.01)

    case.blocks(stack)[at][1].register_forward_hook(hook)
    return ("radient",)


def _rounded(case: Case, stack: str, at: int):
    """Weights stored as integers without a scale."""
    found = _named(case.blocks(stack)[at][1], (*_VALUE, "c_attn"))
    if found is None:
        return None
    found[1].weight.data.round_()
    return ("zero",)


def _sigmoid(attend, q, k, v, seen, scale):
    weights = torch.sigmoid(q @ k.mT * scale)
    return (weights if seen is None else weights * seen) @ v


def _first_key(attend, q, k, v, seen, scale):
    """k[:, :, :1], v[:, :, :1], as of a cache that was not filled."""
    return attend(q, k[:, :, :1], v[:, :, :1], scale=scale)


def _one_too_wide(attend, q, k, v, seen, scale):
    length = q.shape[-2]
    return attend(q, k, v, attn_mask=torch.ones(length, length, dtype=torch.bool).tril(1), scale=scale)


def _scaled_twice(attend, q, k, v, seen, scale):
    return attend(q, k, v, attn_mask=seen, scale=scale * q.shape[-1] ** -0.5)


def _embedding_times(factor: float, *words: str) -> Fault:
    """A table of tokens of another size than the network expects."""

    def plant(case: Case, stack: str, at: int):
        tables = [m for m in case.model.modules() if isinstance(m, nn.Embedding)]
        table = next((each for each in tables if each.num_embeddings == VOCABULARY), None)
        if table is None:
            return None
        table.weight.data.mul_(factor)
        return words

    return Fault(plant, whole=True, fixed=0, noted=True)


class _Reversed(nn.ModuleList):
    def __iter__(self):
        return reversed([*self.children()])


def _reversed_blocks(case: Case, stack: str, at: int):
    """for block in reversed(self.blocks)."""
    around, _, own = stack.rpartition(".")
    owner = case.model.get_submodule(around)
    if isinstance(case.model, transformers.GemmaForCausalLM | transformers.Starcoder2ForCausalLM):
        return None  # they cut their list, which makes another of it
    setattr(owner, own, _Reversed(getattr(owner, own).children()))
    return ("order", "ran before", "reverse")


def _positions_held(case: Case, stack: str, at: int):
    """positions.clamp(max=3): all later locations have one."""
    tables = [
        (name, m)
        for name, m in case.model.named_modules()
        if isinstance(m, nn.Embedding) and m.num_embeddings != VOCABULARY and ("pos" in name or "wpe" in name)
    ]
    side = [(n, m) for n, m in tables if len(case.stacks) < 2 or stack.split(".")[1] in n]
    if not side or isinstance(case.model, transformers.RobertaForMaskedLM):
        return None
    weight = side[0][1].weight.data
    weight[6:] = weight[6:7].clone()
    return ("position",)


def _head_reads_the_embedding(case: Case, stack: str, at: int):
    """logits = self.lm_head(self.ln_f(embedded)): the blocks run for nothing."""
    if not isinstance(case.model, Nano):
        return None
    read: list[Tensor] = []
    case.model.h[0].register_forward_pre_hook(lambda module, args: read.append(args[0]))
    case.model.ln_f.register_forward_pre_hook(lambda module, args: (read.pop(),))
    return ("not read", "unused", "does not change", "nothing depends", "head")


_WEIGHTS = ("softmax", "attention", "sum to")
_IN_A_BLOCK: dict[str, Fault] = {
    "values are the keys": Fault(_values_are_keys, noted=True),
    "stream halved": stream(lambda x: 0.5 * x, "factor", "shortcut"),
    "norm over locations": Fault(_norm_over_locations),
    "one matrix frozen": Fault(_one_matrix_frozen, noted=True),
    "drawn by torch's default": Fault(_drawn_by_default, noted=True),
    "scaled for depth twice": Fault(_scaled_for_depth_twice, noted=True),
    "output not read": Fault(_output_not_read, noted=True),
    "BatchNorm for LayerNorm": Fault(_batch_norm, noted=True),
    "activation behind the MLP": Fault(_activation_behind_the_mlp, noted=True),
    "gradient times 0.01": Fault(_gradient_scaled, noted=True),
    "weights rounded to integers": Fault(_rounded),
    "sigmoid for softmax": attention(_sigmoid, _WEIGHTS, _WEIGHTS, noted=True),
    "first key only": attention(_first_key, ("first", "one key"), ("first", "one key"), noted=True),
    "mask one too wide": attention(_one_too_wide, ("future",), None),
    "scores scaled twice": attention(_scaled_twice, ("scale", "scores"), ("scale", "scores")),
}
FAULTS: dict[str, Fault] = {
    **_IN_A_BLOCK,
    **{
        f"{name}, every block": Fault(everywhere(each).plant, whole=True, fixed=0, noted=each.noted)
        for name, each in _IN_A_BLOCK.items()
        if name not in ("output not read", "one matrix frozen")
    },
    "embedding too small": _embedding_times(1e-4, "mbedding", "token"),
    "embedding too large": _embedding_times(1e3, "mbedding", "token", "large"),
    "blocks in reverse": Fault(_reversed_blocks, whole=True, fixed=0, noted=True),
    "positions held": Fault(_positions_held, whole=True, fixed=0, noted=True),
    "head reads the embedding": Fault(_head_reads_the_embedding, whole=True, fixed=0, noted=True),
}
