"""A third catalogue, written before any of it was run: mistakes in code, in one block or in the class of all of them.

Its networks and mistakes are in neither of the other two. Siblings do not help where every block has the mistake, and
that is what happens to those who write one class. What was found when they were first run stands in
docs/faults.md. `words` are the cause as it was expected then.
"""

import functools
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
    everywhere,
    images,
    stream,
    tokens,
)
from tests.inspection.held_out import Attending
from torch import Tensor, nn
from torch.nn import functional as F

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _sizes(size: Size) -> dict:
    return {"hidden_size": size.width, "num_hidden_layers": size.depth, "num_attention_heads": size.heads}


def _ids(size: Size) -> dict:
    return {"input_ids": tokens(size.seed)}


def _opt(size: Size) -> Case:
    """Learned positions, queries scaled before the product."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        ffn_dim=2 * size.width,
        word_embed_proj_dim=size.width,
        max_position_embeddings=32,
        **_sizes(size),
        **_SPECIAL,
    )
    return Case(transformers.OPTForCausalLM(config), _ids(size), ("model.decoder.layers",), True)


def _qwen2(size: Size) -> Case:
    """Rotation, gated MLP, biases of queries, keys and values."""
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        intermediate_size=2 * size.width,
        num_key_value_heads=size.heads,
        **_sizes(size),
        **_SPECIAL,
    )
    return Case(transformers.Qwen2ForCausalLM(config), _ids(size), ("model.layers",), True)


def _bloom(size: Size) -> Case:
    """Distances are added to scores, which are computed by hand."""
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=size.width, n_layer=size.depth, n_head=size.heads, **_SPECIAL
    )
    return Case(transformers.BloomForCausalLM(config), _ids(size), ("transformer.h",), True)


def _distilbert(size: Size) -> Case:
    """Post-LN, reads both ways."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=size.width,
        n_layers=size.depth,
        n_heads=size.heads,
        hidden_dim=2 * size.width,
        max_position_embeddings=32,
        pad_token_id=None,
    )
    model = transformers.DistilBertForMaskedLM(config)
    return Case(model, _ids(size), ("distilbert.transformer.layer",))


def _marian(size: Size) -> Case:
    """Encoder and decoder, Post-LN, sinusoidal positions."""
    sides = {f"{side}_{word}": value for side in ("encoder", "decoder") for word, value in
             {"layers": size.depth, "attention_heads": size.heads, "ffn_dim": 2 * size.width}.items()}  # fmt: skip
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=size.width,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        **sides,
    )
    batch = {"input_ids": tokens(size.seed), "decoder_input_ids": tokens(size.seed + 7)}
    stacks = ("model.encoder.layers", "model.decoder.layers")
    return Case(transformers.MarianMTModel(config), batch, stacks)


def _deit(size: Size) -> Case:
    """Vision, with a token to distil by."""
    config = transformers.DeiTConfig(image_size=16, patch_size=4, intermediate_size=2 * size.width, **_sizes(size))
    return Case(transformers.DeiTForImageClassification(config), {"pixel_values": images(size.seed)}, ("deit.layers",))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Softmax attention by hand; seen is what each query may see, or None for everything."""
    scores = q @ k.transpose(-2, -1) * scale
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return F.softmax(scores, dim=-1) @ v


class SelfAttention(nn.Module):
    """As in small GPTs: a mask kept as a buffer."""

    def __init__(self, size: Size):
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(size.width, size.width) for _ in range(4))
        self.heads, self.attend = size.heads, attend
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            each(x).view(rows, length, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        y = self.attend(q, k, v, self.tril[:length, :length], q.shape[-1] ** -0.5)
        return self.proj(y.transpose(1, 2).reshape(rows, length, width))


class MiniBlock(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(size.width), nn.LayerNorm(size.width), SelfAttention(size)
        wide, self.activation = 4 * size.width, nn.GELU()
        self.fc, self.proj = nn.Linear(size.width, wide), nn.Linear(wide, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.proj(self.activation(self.fc(self.ln2(x))))


class MiniGPT(nn.Module):
    """Blocks in a Sequential."""

    def __init__(self, size: Size):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCABULARY, size.width), nn.Embedding(LENGTH, size.width)
        self.blocks = nn.Sequential(*(MiniBlock(size) for _ in range(size.depth)))
        self.ln_f, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_emb(input_ids) + self.pos_emb(torch.arange(input_ids.shape[1]))
        return self.head(self.ln_f(self.blocks(x)))


class LayerNorm(nn.Module):
    """Written by hand."""

    def __init__(self, width: int):
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class MultiHeadedAttention(nn.Module):
    """Four matrices in one list: of queries, keys, values and outputs."""

    def __init__(self, size: Size):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(4))
        self.h, self.attend = size.heads, attend

    def forward(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = (
            matrix(x).view(len(x), -1, self.h, x.shape[-1] // self.h).transpose(1, 2)
            for matrix, x in zip(self.linears, (query, key, value), strict=False)
        )
        y = self.attend(q, k, v, seen, q.shape[-1] ** -0.5)
        return self.linears[-1](y.transpose(1, 2).reshape(query.shape))


class EncoderLayer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.self_attn, self.norms = MultiHeadedAttention(size), nn.ModuleList(LayerNorm(size.width) for _ in range(2))
        self.w_1, self.w_2 = nn.Linear(size.width, 2 * size.width), nn.Linear(2 * size.width, size.width)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, y, seen)
        return x + self.w_2(self.activation(self.w_1(self.norms[1](x))))


class Encoder(nn.Module):
    """As in a well-known annotated transformer: embeddings times √width, sinusoidal positions."""

    def __init__(self, size: Size):
        super().__init__()
        self.lut, self.width = nn.Embedding(VOCABULARY, size.width), size.width
        angles = torch.arange(32)[:, None] * 1e4 ** (-torch.arange(0, size.width, 2) / size.width)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.layers = nn.ModuleList(EncoderLayer(size) for _ in range(size.depth))
        self.norm, self.generator = LayerNorm(size.width), nn.Linear(size.width, VOCABULARY)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.xavier_uniform_(each)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.lut(input_ids) * self.width**0.5 + self.pe[: input_ids.shape[1]]
        seen = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, seen)
        return self.generator(self.norm(x))


ARCHITECTURES: dict[str, Callable[[Size], Case]] = {
    "opt": _opt,
    "qwen2": _qwen2,
    "bloom": _bloom,
    "distilbert": _distilbert,
    "marian": _marian,
    "deit": _deit,
    "minigpt": lambda size: Case(MiniGPT(size), _ids(size), ("blocks",), True),
    "annotated": lambda size: Case(Encoder(size), _ids(size), ("layers",)),
}


def looks_back(case: Case, stack: str) -> bool:
    """Whether the stack is made to see only what came before."""
    return case.causal or "decoder" in stack


def attention(change: Callable[..., Tensor], *words: str) -> Fault:
    """Attention of a block that looks back is done by change(q, k, v, seen, scale)."""

    def plant(case: Case, stack: str, at: int):
        block = case.blocks(stack)[at][1]
        if not looks_back(case, stack) or isinstance(case.model, transformers.BloomForCausalLM):
            return None
        own = next((module for module in block.modules() if hasattr(module, "attend")), None)
        if own is not None:
            own.attend = change
            return words
        forward = block.forward

        def changed(*args, **kwargs):
            with Attending(lambda attend, *inputs: change(*inputs)):
                return forward(*args, **kwargs)

        block.forward = changed
        return words

    return Fault(plant)


def _tiny_mask(q, k, v, seen, scale):
    """−1e-9 where −1e9 was meant."""
    scores = (q @ k.mT * scale).masked_fill(~_square(q, seen), -1e-9)
    return torch.softmax(scores, -1) @ v


def _masked_after(q, k, v, seen, scale):
    return torch.softmax(q @ k.mT * scale, -1) * _square(q, seen) @ v


def _not_itself(q, k, v, seen, scale):
    """A triangle without its diagonal, so that the first location sees nothing."""
    seen = _square(q, seen).tril(-1)
    return torch.softmax((q @ k.mT * scale).masked_fill(~seen, -1e9), -1) @ v


def _square(q: Tensor, seen: Tensor | None) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril() if seen is None else seen


def _norm(block: nn.Module) -> tuple[str, nn.Module]:
    return next((name, m) for name, m in block.named_modules() if "Norm" in type(m).__name__)


def _norm_not_called(case: Case, stack: str, at: int):
    name, norm = _norm(case.blocks(stack)[at][1])
    norm.forward = lambda x, *args: x
    return (name, "not used", "never used", "no gradient")


def _norm_of_all(case: Case, stack: str, at: int):
    """LayerNorm([T, width]) for LayerNorm(width): locations share a mean and a deviation."""
    if not looks_back(case, stack):
        return None
    _, norm = _norm(case.blocks(stack)[at][1])
    norm.forward = lambda x, *args: F.layer_norm(x, x.shape[1:]) if x.dim() == 3 else F.layer_norm(x, x.shape)
    return ("future", "row")


def _keys_by_queries(case: Case, stack: str, at: int):
    """A line copied and not changed: the matrix of queries makes the keys as well."""
    block = case.blocks(stack)[at][1]
    modules = dict(block.named_modules())
    for name, module in modules.items():
        tail = name.rpartition(".")[2]
        twin = {"k_proj": "q_proj", "k_lin": "q_lin", "key": "query"}.get(tail)
        if twin is not None:
            query = modules[name[: -len(tail)] + twin]
            module.forward = lambda x, query=query: query(x)
            return (name, "not used", "never used", "no gradient")
    return None


def _no_activation(case: Case, stack: str, at: int):
    """Two matrices of the MLP with nothing between them."""
    for module in case.blocks(stack)[at][1].modules():
        for word in ("activation", "activation_fn", "gelu_impl"):
            if hasattr(module, word):
                setattr(module, word, nn.Identity())
                return ("activation", "linear")
    return None


def _constant(case: Case, stack: str, at: int):
    """Every entry the same, so that all units of the MLP learn the same."""
    block = case.blocks(stack)[at][1]
    names = ("fc1.weight", "gate_proj.weight", "dense_h_to_4h.weight", "lin1.weight", "fc.weight", "w_1.weight")
    name = next(name for name, _ in block.named_parameters() if name.endswith(names))
    with torch.no_grad():
        dict(block.named_parameters())[name].fill_(0.02)
    return (name, "constant", "same", "rank")


def _deviation_one(case: Case, stack: str, at: int):
    """nn.init.normal_ as it is when it is given nothing."""
    with torch.no_grad():
        for each in case.blocks(stack)[at][1].parameters():
            if each.dim() > 1:
                each.normal_()
    return ("larger", "large", "explode", "one key", "one location", "saturated", "jumps")


def _restless_dropout(case: Case, stack: str, at: int):
    """F.dropout(x, 0.1) without training=self.training."""
    found = stream(lambda x: F.dropout(x, 0.1), "ropout", "twice", "random")
    return found.plant(case, stack, at)


def _head(case: Case) -> nn.Module:
    model = case.model
    give = getattr(model, "get_output_embeddings", lambda: None)()
    return give or getattr(model, "head", None) or getattr(model, "generator", None) or model.classifier


def _probabilities(case: Case, stack: str, at: int):
    """A softmax before a loss that takes logits."""
    _head(case).register_forward_hook(lambda module, args, out: out.softmax(-1))
    return ("softmax", "probabilit", "logits")


def padded(case: Case) -> bool:
    """Put padding into the batch, on the side where a mask is needed; whether the model reads a mask."""
    if "input_ids" not in case.batch or isinstance(case.model, MiniGPT):
        return False
    mask = torch.ones_like(case.batch["input_ids"])
    mask[1, slice(0, 4) if case.causal else slice(-4, None)] = 0
    case.batch["attention_mask"] = mask
    return True


def mask_changed(change: Callable[[Tensor], Tensor], *words: str) -> Fault:
    """The model makes something else of attention_mask than it is."""

    def plant(case: Case, stack: str, at: int):
        if not padded(case):
            return None
        forward = case.model.forward

        @functools.wraps(forward)
        def changed(*args, **kwargs):
            return forward(*args, **{**kwargs, "attention_mask": change(kwargs["attention_mask"])})

        case.model.forward = changed
        return words

    return Fault(plant, whole=True, fixed=0, noted=True)


def _drowned(case: Case, stack: str, at: int):
    """Tokens drawn a thousand times smaller than positions."""
    if len(case.stacks) > 1:
        return None
    names = ("embed_tokens.weight", "word_embeddings.weight", "tok_emb.weight", "lut.weight", "projection.weight")
    places = ("position", "pos_emb", "pe")
    if not any(word in name for word in places for name in case.model.state_dict()):
        return None  # rotations and distances are added to nothing
    for name, values in case.model.named_parameters():
        if name.endswith(names):
            with torch.no_grad():
                values.mul_(1e-3)
            return ("token", "embedding", "batch itself", "input")
    return None


def _group(case: Case, stack: str) -> tuple[nn.Module, str, nn.Module]:
    above, _, name = stack.rpartition(".")
    return case.model.get_submodule(above), name, case.model.get_submodule(stack)


def _plain_list(case: Case, stack: str, at: int):
    """Blocks in a list of Python's, where parameters() does not see them."""
    owner, name, group = _group(case, stack)
    if isinstance(group, nn.Sequential) or isinstance(case.model, transformers.PreTrainedModel):
        return None  # it would not run, or is not written by hand
    delattr(owner, name)
    setattr(owner, name, list(group))
    return ("ModuleList",)


def _one_block_repeated(case: Case, stack: str, at: int):
    """ModuleList([Block()] * depth)."""
    owner, name, group = _group(case, stack)
    setattr(owner, name, type(group)(*[group[0]] * len(group)) if isinstance(group, nn.Sequential) else
            nn.ModuleList([group[0]] * len(group)))  # fmt: skip
    return ("shared", "same weights", "twice", "same module")


class _Short(nn.ModuleList):
    def __iter__(self):
        return iter(list(super().__iter__())[:-1])


class _ShortSequential(nn.Sequential):
    def __iter__(self):
        return iter(list(super().__iter__())[:-1])


def _last_left_out(case: Case, stack: str, at: int):
    """A loop that ends one block early, as where a config says one less than the list holds."""
    group = case.model.get_submodule(stack)
    group.__class__ = _ShortSequential if isinstance(group, nn.Sequential) else _Short
    return ("did not run", "never runs", "not run")


class _Pooled(nn.Module):
    """Reads one location of a network that looks back."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        out = self.model(input_ids)
        return getattr(out, "logits", out)[:, 0]


def _first_read(case: Case, stack: str, at: int):
    """A class is read from the first location, which has seen nothing but itself."""
    if not case.causal:
        return None
    object.__setattr__(case, "model", _Pooled(case.model))
    object.__setattr__(case, "stacks", tuple(f"model.{name}" for name in case.stacks))
    return ("first location", "last token", "location")


def _blind_decoder(case: Case, stack: str, at: int):
    """Attention across reads the decoder's own states."""
    if len(case.stacks) < 2:
        return None
    for _, block in case.blocks(case.stacks[1]):
        forward = block.forward

        def changed(x, *args, forward=forward, **kwargs):
            inputs = [x if arg is not None and arg.shape == x.shape else arg for arg in args]
            kwargs |= {"encoder_hidden_states": x} if "encoder_hidden_states" in kwargs else {}
            return forward(x, *inputs, **kwargs)

        block.forward = changed
    return ("encoder",)


_IN_A_BLOCK: dict[str, Fault] = {
    "mask of -1e-9": attention(_tiny_mask, "future"),
    "mask after the softmax": attention(_masked_after, "future"),
    "own location hidden": attention(_not_itself, "itself", "own", "mask", "future"),
    "norm not called": Fault(_norm_not_called, noted=True),
    "norm over all locations": Fault(_norm_of_all),
    "keys by the queries' matrix": Fault(_keys_by_queries, noted=True),
    "no activation": Fault(_no_activation, noted=True),
    "activation on the stream": stream(F.relu, "negative", "activation", "shortcut", "factor"),
    "constant matrix": Fault(_constant, noted=True),
    "drawn with deviation one": Fault(_deviation_one),
    "dropout that never rests": Fault(_restless_dropout, noted=True),
}
FAULTS: dict[str, Fault] = {
    **_IN_A_BLOCK,
    **{
        f"{name}, every block": Fault(everywhere(each).plant, whole=True, fixed=0, noted=each.noted)
        for name, each in _IN_A_BLOCK.items()
    },
    "probabilities for logits": Fault(_probabilities, whole=True, fixed=0, noted=True),
    "padding seen": mask_changed(lambda mask: torch.ones_like(mask), "padding"),
    "padding mask inverted": mask_changed(lambda mask: 1 - mask, "padding", "mask"),
    "positions drown tokens": Fault(_drowned, whole=True, fixed=0, noted=True),
    "plain list of blocks": Fault(_plain_list, whole=True, fixed=0, noted=True),
    "one block repeated": Fault(_one_block_repeated, whole=True, fixed=0, noted=True),
    "last block left out": Fault(_last_left_out, whole=True, fixed=0, noted=True),
    "first location read": Fault(_first_read, whole=True, fixed=0, noted=True),
    "decoder blind to the encoder": Fault(_blind_decoder, whole=True, fixed=0, noted=True),
}
