"""A sixth catalogue, written when the rules for the fifth were done and before any of it was run.

These are bugs that people report of networks which they wrote or converted. Some of them change nothing that can be
measured in a random network, such as two matrices of one shape that change places: they are in it because they happen.
What was found when it was first run stands in docs/faults.md. `words` are the cause as it was expected then.
Attention is written out in all of these networks, so that a bug inside it is planted without another change.
"""

from collections.abc import Callable

import torch
import transformers
from tests.inspection.catalogue import VOCABULARY, Case, Fault, Size, everywhere, images, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_EAGER = {"attn_implementation": "eager"}


def _sizes(size: Size) -> dict:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width,
    }


def _gptj(size: Size) -> Case:
    """Attention and MLP side by side behind one norm, pairs of channels rotated."""
    config = transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=size.width,
        n_layer=size.depth,
        n_head=size.heads,
        n_inner=2 * size.width,
        rotary_dim=4,
        **_SPECIAL,
        **_EAGER,
    )
    return Case(transformers.GPTJForCausalLM(config), {"input_ids": tokens(size.seed)}, ("transformer.h",), True)


def _granite(size: Size) -> Case:
    """Several query heads share a key, halves of a head are rotated, gated MLP."""
    config = transformers.GraniteConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=size.heads // 2,
        attention_multiplier=(size.width // size.heads) ** -0.5,
        **_sizes(size),
        **_SPECIAL,
        **_EAGER,
    )
    return Case(transformers.GraniteForCausalLM(config), {"input_ids": tokens(size.seed)}, ("model.layers",), True)


def _mpnet(size: Size) -> Case:
    """Post-LN, reads both ways, distances are added to scores."""
    config = transformers.MPNetConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **_sizes(size), **_EAGER)
    return Case(transformers.MPNetForMaskedLM(config), {"input_ids": tokens(size.seed)}, ("mpnet.encoder.layer",))


def _blenderbot(size: Size) -> Case:
    """Encoder and decoder, Pre-LN; the encoder reads ten tokens, the decoder twelve."""
    sides = {f"{side}_{word}": value for side in ("encoder", "decoder") for word, value in
             {"layers": size.depth, "attention_heads": size.heads, "ffn_dim": 2 * size.width}.items()}  # fmt: skip
    config = transformers.BlenderbotConfig(
        vocab_size=VOCABULARY,
        d_model=size.width,
        max_position_embeddings=32,
        scale_embedding=True,
        forced_eos_token_id=None,
        **sides,
        **_EAGER,
    )
    batch = {"input_ids": tokens(size.seed, length=10), "decoder_input_ids": tokens(size.seed + 7)}
    stacks = ("model.encoder.layers", "model.decoder.layers")
    return Case(transformers.BlenderbotForConditionalGeneration(config), batch, stacks)


def _beit(size: Size) -> Case:
    """Vision, with distances on a grid and a factor for each channel on each branch."""
    config = transformers.BeitConfig(
        image_size=16, patch_size=4, use_relative_position_bias=True, **_sizes(size), **_EAGER
    )
    return Case(transformers.BeitForImageClassification(config), {"pixel_values": images(size.seed)}, ("beit.layers",))


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """As in many small Llamas: two query heads share a key, pairs of channels are rotated."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.kv_heads, self.theta = size.heads, size.heads // 2, 1e4
        head = size.width // size.heads
        self.wq, self.wo = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(size.width, self.kv_heads * head, bias=False) for _ in range(2))

    def cut(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, -1)

    def angles(self, x: Tensor) -> Tensor:
        steps = self.theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        return (torch.arange(x.shape[1])[:, None] * steps)[:, None]

    def rotate(self, x: Tensor) -> Tensor:
        """(rows, T, heads, head width)."""
        angles = self.angles(x)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack(
            [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
        ).flatten(-2)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, dim=2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            self.cut(w(x), n) for w, n in ((self.wq, self.heads), (self.wk, self.kv_heads), (self.wv, self.kv_heads))
        )
        return self.rotate(q), self.rotate(k), v

    def move(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        q, k, v = self.move(q), self.move(self.repeat(k)), self.move(self.repeat(v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = F.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1) @ v
        return self.wo(self.move(y).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.width, 2 * size.width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * size.width, size.width, bias=False)

    def gated(self, x: Tensor) -> Tensor:
        return F.silu(self.w1(x)) * self.w3(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gated(x))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.attention, self.feed_forward = Attention(size), FeedForward(size)
        self.attention_norm, self.ffn_norm = RMSNorm(size.width), RMSNorm(size.width)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Tiny(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.output = RMSNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.tok_embeddings(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


ARCHITECTURES: dict[str, Callable[[Size], Case]] = {
    "gptj": _gptj,
    "granite": _granite,
    "mpnet": _mpnet,
    "blenderbot": _blenderbot,
    "beit": _beit,
    "tiny": lambda size: Case(Tiny(size), {"input_ids": tokens(size.seed)}, ("layers",), causal=True),
}
_QUERY, _KEY = (
    ("q_proj", "attn.q", "attention.query", "attention.wq"),
    ("k_proj", "attn.k", "attention.key", "attention.wk"),
)
_OUTPUT = ("o_proj", "out_proj", "attn.o", "attention.output.dense", "attention.wo")
_FIRST = ("fc_in", "gate_proj", "intermediate.dense", "fc1", "w1")
_LAST = ("fc_out", "down_proj", "output.dense", "fc2", "w2")


def _named(block: nn.Module, suffixes: tuple[str, ...]) -> tuple[str, nn.Module] | None:
    """The last module of a block whose name ends so; a decoder's attention to its encoder is left alone."""
    fits = [(n, m) for n, m in block.named_modules() if n.endswith(suffixes) and "encoder_attn" not in n]
    return fits[-1] if fits else None


def _norms(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in block.named_modules() if "Norm" in type(each).__name__]


def _back(case: Case, stack: str) -> bool:
    return case.causal or "decoder" in stack


class _Softmax(TorchFunctionMode):
    """While open, attention's softmax of scores (rows, heads, queries, keys) is done by `change`."""

    def __init__(self, change: Callable[[Tensor], Tensor], across: bool):
        super().__init__()
        self.change, self.across = change, across

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            scores = args[0] if args else kwargs["input"]
            if scores.dim() == 4 and (scores.shape[-1] != scores.shape[-2]) == self.across:
                return self.change(scores)
        return func(*args, **kwargs)


def softmax(change: Callable[[Tensor], Tensor], *words: str, across: bool = False) -> Fault:
    """A block whose attention makes its weights by `change(scores)`; `across`: that of a decoder to its encoder."""

    def plant(case: Case, stack: str, at: int):
        if across and "decoder" not in stack:
            return None
        block = case.blocks(stack)[at][1]
        forward = block.forward

        def changed(*args, **kwargs):
            with _Softmax(change, across):
                return forward(*args, **kwargs)

        block.forward = changed
        return words

    return Fault(plant, noted=True)


def _hidden(scores: Tensor, where: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(where, torch.finfo(scores.dtype).min), -1)


def _window(scores: Tensor) -> Tensor:
    """Locations see the last four, as of a sliding window that was left on."""
    index = torch.arange(scores.shape[-1])
    return _hidden(scores, (index[:, None] - index).abs() > 3)


def _first_hidden(scores: Tensor) -> Tensor:
    """The first key is taken for padding."""
    where = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    where[1:, 0] = True
    return _hidden(scores, where)


def _across_causal(scores: Tensor) -> Tensor:
    """The decoder's own mask on what it sees of the encoder."""
    return _hidden(scores, torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1))


def _result(change: Callable[[Tensor], Tensor], suffixes: tuple[str, ...], *words: str) -> Fault:
    """Changes what a matrix gives."""

    def plant(case: Case, stack: str, at: int):
        found = _named(case.blocks(stack)[at][1], suffixes)
        if found is None:
            return None
        found[1].register_forward_hook(lambda module, args, out: change(out))
        return words

    return Fault(plant, noted=True)


def _weights(change: Callable[[Tensor], Tensor], suffixes: tuple[str, ...], *words: str) -> Fault:
    """Changes a matrix; its name is a cause as well."""

    def plant(case: Case, stack: str, at: int):
        found = _named(case.blocks(stack)[at][1], suffixes)
        if found is None:
            return None
        found[1].weight.data.copy_(change(found[1].weight.data))
        return (*words, f"{found[0]}.weight")

    return Fault(plant, noted=True)


def _adapter(weight: Tensor) -> Tensor:
    """W + 2·BA, where BA is as large as W."""
    out, read = weight.shape
    update = torch.randn(out, 2) @ torch.randn(2, read)
    return weight + 2 * update * weight.norm() / update.norm()


def _pruned(weight: Tensor) -> Tensor:
    return weight * (torch.rand_like(weight) > 0.5)


def _bias_left_out(case: Case, stack: str, at: int):
    """Linear(…, bias=False) in one block, whose biases are not loaded."""
    found = _named(case.blocks(stack)[at][1], _FIRST)
    if found is None or found[1].bias is None:
        return None
    found[1].bias = None
    return ("bias",)


def _swapped(one: tuple[str, ...], two: tuple[str, ...], *words: str) -> Fault:
    def plant(case: Case, stack: str, at: int):
        block = case.blocks(stack)[at][1]
        first, second = _named(block, one), _named(block, two)
        if first is None or second is None or first[1].weight.shape != second[1].weight.shape:
            return None
        kept = first[1].weight.data.clone()
        first[1].weight.data.copy_(second[1].weight.data)
        second[1].weight.data.copy_(kept)
        return words

    return Fault(plant, noted=True)


def _neighbours_matrix(case: Case, stack: str, at: int):
    """One matrix of a block is loaded from the block before."""
    if at == 0:
        return None
    own, other = (_named(case.blocks(stack)[index][1], _FIRST) for index in (at, at - 1))
    own[1].weight.data.copy_(other[1].weight.data)
    return ("same", "copy", f"{own[0]}.weight")


def _gamma_and_beta(case: Case, stack: str, at: int):
    """A norm's weight is loaded as its bias and the other way round."""
    name, norm = _norms(case.blocks(stack)[at][1])[0]
    if getattr(norm, "bias", None) is None:
        return None
    kept = norm.weight.data.clone()
    norm.weight.data.copy_(norm.bias.data)
    norm.bias.data.copy_(kept)
    return (name, "zero")


def _one_added(case: Case, stack: str, at: int):
    """Norms that store their weights less one are loaded with one added, into a norm that adds it."""
    names = []
    for name, norm in _norms(case.blocks(stack)[at][1]):
        norm.weight.data.add_(1.0)
        names.append(f"{name}.weight")
    return tuple(names)


def _normalised(change: Callable[[Tensor, nn.Module], Tensor], *words: str, centred: bool = False) -> Fault:
    """Another norm in the place of each of a block's; centred: only of those that take a mean away."""

    def plant(case: Case, stack: str, at: int):
        norms = _norms(case.blocks(stack)[at][1])
        if centred and not all(isinstance(norm, nn.LayerNorm) for _, norm in norms):
            return None
        for _, norm in norms:
            norm.forward = lambda x, norm=norm: change(x, norm)
        return (*words, *(name for name, _ in norms))

    return Fault(plant, noted=True)


def _root_forgotten(x: Tensor, norm: nn.Module) -> Tensor:
    """Divided by the variance, not by its root."""
    if isinstance(norm, nn.LayerNorm):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5) * norm.weight + norm.bias
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight


def _root_mean_square(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, 1e-5) + norm.bias


def _location_before(case: Case, stack: str, at: int):
    """A branch reads the location before its own, as behind padding on the wrong side."""
    _, norm = _norms(case.blocks(stack)[at][1])[0]
    if isinstance(case.model, transformers.MPNetForMaskedLM):
        return None
    norm.register_forward_hook(lambda module, args, out: F.pad(out[:, :-1], (0, 0, 1, 0)))
    return ("location", "order", "zero", "pad")


def _path_dropped(case: Case, stack: str, at: int):
    """Stochastic depth that does not ask for the mode."""

    def hook(module, args, kwargs, out):
        before = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
        x = out if isinstance(out, Tensor) else out[0]
        kept = (torch.rand(len(x), 1, 1) > 0.5).to(x.dtype)
        x = before + kept * (x - before)
        return x if isinstance(out, Tensor) else (x, *out[1:])

    case.blocks(stack)[at][1].register_forward_hook(hook, with_kwargs=True)
    return ("twice", "ropout", "random", "unchanged")


def _gate_open(case: Case, stack: str, at: int):
    """gate(x)·up(x) without the activation."""
    block = case.blocks(stack)[at][1]
    if isinstance(case.model, Tiny):
        own = block.feed_forward
        own.gated = lambda x: own.w1(x) * own.w3(x)
    elif isinstance(case.model, transformers.GraniteForCausalLM):
        block.mlp.act_fn = nn.Identity()
    else:
        return None
    return ("activation", "silu", "linear")


def _rounded(case: Case, stack: str, at: int):
    """The stream is cast to bfloat16 and back."""

    def hook(module, args, out):
        x = out if isinstance(out, Tensor) else out[0]
        x = x.to(torch.bfloat16).to(x.dtype)
        return x if isinstance(out, Tensor) else (x, *out[1:])

    case.blocks(stack)[at][1].register_forward_hook(hook)
    return ("bfloat16", "precision", "round")


def _distances_dropped(case: Case, stack: str, at: int):
    """What is to be added to scores is not handed on."""
    if not isinstance(case.model, transformers.MPNetForMaskedLM):
        return None
    attention = case.blocks(stack)[at][1].attention.attn
    forward = attention.forward
    attention.forward = lambda x, mask=None, bias=None, *args, **kwargs: forward(x, mask, None, *args, **kwargs)
    return ("position", "distance", "bias", "a sum")


def tiny(change: Callable[[Block], None], *words: str) -> Fault:
    """Changes the code of a block that is written by hand."""

    def plant(case: Case, stack: str, at: int):
        if not isinstance(case.model, Tiny):
            return None
        change(case.blocks(stack)[at][1])
        return words

    return Fault(plant, noted=True)


def _halves(block: Block) -> None:
    """Weights are made for pairs of channels, and halves are rotated."""
    own = block.attention

    def rotate(x: Tensor) -> Tensor:
        angles = own.angles(x)
        one, two = x.chunk(2, -1)
        return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)

    own.rotate = rotate


def _values_rotated(block: Block) -> None:
    own = block.attention
    project = own.project

    def changed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(x)
        return q, k, own.rotate(v)

    own.project = changed


def _rotated_whole(block: Block) -> None:
    """Rotated over the whole width, before heads are cut out."""
    own = block.attention

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (own.rotate(own.cut(w(x), 1)).flatten(2) for w in (own.wq, own.wk))
        return own.cut(q, own.heads), own.cut(k, own.kv_heads), own.cut(own.wv(x), own.kv_heads)

    own.project = project


def _rotated_by_head(block: Block) -> None:
    """Angles follow the axis of heads, where that of locations was meant: all locations have the same."""
    own = block.attention

    def angles(x: Tensor) -> Tensor:
        steps = own.theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        return torch.arange(x.shape[2])[:, None] * steps

    own.angles = angles


def _other_base(block: Block) -> None:
    block.attention.theta = 5e5


def _groups_tiled(block: Block) -> None:
    """k.repeat for k.repeat_interleave: queries get the keys of another group."""
    own = block.attention
    own.repeat = lambda x: x.repeat(1, 1, own.heads // own.kv_heads, 1)


def _over_heads(block: Block) -> None:
    """No transpose: attention runs over heads, and locations never meet."""
    block.attention.move = lambda x: x


def _norm_behind(block: Block) -> None:
    """x = norm(x + branch(x))."""

    def forward(x: Tensor) -> Tensor:
        h = block.attention_norm(x + block.attention(x))
        return block.ffn_norm(h + block.feed_forward(h))

    block.forward = forward


def _beside(block: Block) -> None:
    """The MLP reads what the block reads, not the sum."""
    block.forward = lambda x: x + block.attention(block.attention_norm(x)) + block.feed_forward(block.ffn_norm(x))


def _cut_across(block: Block) -> None:
    """view(…, head width, heads): a head gets every fourth channel."""
    own = block.attention
    own.cut = lambda x, heads: x.view(*x.shape[:2], -1, heads).transpose(2, 3)


def _both_activated(block: Block) -> None:
    own = block.feed_forward
    own.gated = lambda x: F.silu(own.w1(x)) * F.silu(own.w3(x))


def _final(case: Case) -> nn.Module | None:
    """The norm between the last block and the head."""
    names = ("transformer.ln_f", "model.norm", "model.decoder.layer_norm", "norm")
    modules = dict(case.model.named_modules())
    return next((modules[name] for name in names if name in modules), None)


def _head(case: Case) -> nn.Module:
    give = getattr(case.model, "get_output_embeddings", lambda: None)()
    return give or getattr(case.model, "output", None) or case.model.classifier


def _no_final_norm(case: Case, stack: str, at: int):
    final = _final(case)
    if final is None:
        return None
    final.forward = lambda x: x
    return ("norm",)


def _logits_late(case: Case, stack: str, at: int):
    """Logits are moved by one location, and the loss moves them once more."""
    if not case.causal:
        return None
    _head(case).register_forward_hook(lambda module, args, out: out.roll(-1, 1))
    return ("future", "shift", "location")


def _last_not_read(case: Case, stack: str, at: int):
    """hidden_states[-2]: the head reads what the last block reads."""
    final = _final(case)
    if final is None or not case.causal:
        return None
    read: list[Tensor] = []
    case.blocks(stack)[-1][1].register_forward_pre_hook(
        lambda module, args, kwargs: read.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    final.register_forward_pre_hook(lambda module, args: (read.pop(),))
    return ("not read", "unused", "last block", "does not change", "nothing depends")


def _sigmoid_for_logits(case: Case, stack: str, at: int):
    _head(case).register_forward_hook(lambda module, args, out: torch.sigmoid(out))
    return ("sigmoid", "logits", "probabilit")


def _embedding_frozen(case: Case, stack: str, at: int):
    give = getattr(case.model, "get_input_embeddings", lambda: case.model.tok_embeddings)
    give().requires_grad_(False)
    return ("frozen", "requires_grad", "learn")


def _deep_copied(case: Case, stack: str, at: int):
    """[copy.deepcopy(block) for _ in range(depth)]: all blocks start as the same."""
    blocks = [block for _, block in case.blocks(stack)]
    for block in blocks[1:]:
        block.load_state_dict(blocks[0].state_dict())
    return ("same weights", "copy", "copies")


def _pixels(case: Case, stack: str, at: int):
    """An image of 0 to 255 that was to be of −1 to 1."""
    if "pixel_values" not in case.batch:
        return None
    values = case.batch["pixel_values"]
    case.batch["pixel_values"] = 255 * (values - values.min()) / (values.max() - values.min())
    return ("input", "image", "large", "batch", "embedding")


def _encoder_skipped(case: Case, stack: str, at: int):
    """The decoder reads the encoder's embedding: what its blocks made of it is thrown away."""
    if len(case.stacks) < 2:
        return None
    read: list[Tensor] = []
    first = case.blocks(case.stacks[0])[0][1]
    first.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    case.model.model.encoder.layer_norm.register_forward_pre_hook(lambda module, args: (read.pop(),))
    return ("not read", "unused", "no gradient", "nothing depends", "does not change")


_SCALE = ("scale", "scores")
_IN_A_BLOCK: dict[str, Fault] = {
    "double softmax": softmax(lambda s: torch.softmax(torch.softmax(s, -1), -1), "softmax", "future"),
    "softmax over heads": softmax(lambda s: torch.softmax(s, 1), "softmax", "future", "sum to"),
    "scale of the whole width": softmax(lambda s: torch.softmax(s / s.shape[1] ** 0.5, -1), *_SCALE, "truediv"),
    "scores times the head's width": softmax(lambda s: torch.softmax(s * 8.0, -1), *_SCALE, "mul"),
    "window left on": softmax(_window, "window", "mask"),
    "first key hidden": softmax(_first_hidden, "first", "mask"),
    "scores of one head for all": softmax(lambda s: torch.softmax(s[:, :1].expand_as(s), -1), "head", "expand"),
    "causal mask across": softmax(_across_causal, "mask", "encoder", across=True),
    "branch subtracted": _result(lambda x: -x, _LAST, "neg", "sign", "subtract"),
    "branch times the share kept": _result(lambda x: 0.9 * x, _LAST, "factor", "product", "mul"),
    "adapter merged twice": _weights(_adapter, _OUTPUT),
    "half of a matrix pruned": _weights(_pruned, _LAST),
    "matrix transposed": _weights(lambda weight: weight.mT.clone(), _OUTPUT, "transpose"),
    "bias left out": Fault(_bias_left_out, noted=True),
    "queries and keys swapped": _swapped(_QUERY, _KEY, "swap", "query", "q_proj"),
    "gate and up swapped": _swapped(("gate_proj", "w1"), ("up_proj", "w3"), "swap", "gate"),
    "one matrix of the neighbour": Fault(_neighbours_matrix, noted=True),
    "gamma and beta swapped": Fault(_gamma_and_beta, noted=True),
    "one added to norms twice": Fault(_one_added, noted=True),
    "root of a norm forgotten": _normalised(_root_forgotten, "normalise"),
    "RMSNorm for LayerNorm": _normalised(_root_mean_square, "norm", centred=True),
    "branch reads the location before": Fault(_location_before, noted=True),
    "stochastic depth that never rests": Fault(_path_dropped, noted=True),
    "gate without activation": Fault(_gate_open, noted=True),
    "stream in bfloat16": Fault(_rounded, noted=True),
    "distances not handed on": Fault(_distances_dropped, noted=True),
    "halves rotated for pairs": tiny(_halves, "rotat", "position", "cat"),
    "values rotated": tiny(_values_rotated, "rotat", "position", "value"),
    "rotated before heads are cut": tiny(_rotated_whole, "rotat", "position", "head"),
    "rotated by head": tiny(_rotated_by_head, "rotat", "position"),
    "another base of angles": tiny(_other_base, "theta"),
    "groups tiled": tiny(_groups_tiled, "repeat"),
    "attention over heads": tiny(_over_heads, "heads", "locations"),
    "norm behind the sum": tiny(_norm_behind, "norm", "shortcut"),
    "MLP beside attention": tiny(_beside, "sum", "order", "MLP"),
    "heads cut across": tiny(_cut_across, "heads", "view", "transpose"),
    "both halves of a gate activated": tiny(_both_activated, "activation"),
}
_ALONE = (  # it takes siblings to be a mistake at all
    "adapter merged twice",
    "bias left out",
    "one matrix of the neighbour",
    "another base of angles",
    "half of a matrix pruned",
    "stream in bfloat16",
)
FAULTS: dict[str, Fault] = {
    **_IN_A_BLOCK,
    **{
        f"{name}, every block": Fault(everywhere(each).plant, whole=True, fixed=0, noted=each.noted)
        for name, each in _IN_A_BLOCK.items()
        if name not in _ALONE
    },
    "final norm left out": Fault(_no_final_norm, whole=True, fixed=0, noted=True),
    "logits one late": Fault(_logits_late, whole=True, fixed=0, noted=True),
    "last block not read": Fault(_last_not_read, whole=True, fixed=0, noted=True),
    "sigmoid for logits": Fault(_sigmoid_for_logits, whole=True, fixed=0, noted=True),
    "embedding frozen": Fault(_embedding_frozen, whole=True, fixed=0, noted=True),
    "blocks deep-copied": Fault(_deep_copied, whole=True, fixed=0, noted=True),
    "pixels of 0 to 255": Fault(_pixels, whole=True, fixed=0, noted=True),
    "encoder skipped": Fault(_encoder_skipped, whole=True, fixed=0, noted=True),
}
