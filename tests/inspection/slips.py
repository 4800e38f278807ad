"""A fourth catalogue, written when the rules for the third were done and before any of it was run.

It says what those rules are worth on mistakes and networks that nobody had in view. What was found when it was first
run stands in docs/faults.md. `words` are the cause as it was expected then.
"""

from collections.abc import Callable

import torch
import transformers
from tests.inspection.catalogue import VOCABULARY, Case, Fault, Size, everywhere, images, through, tokens
from torch import Tensor, nn

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _sizes(size: Size) -> dict:
    return {"hidden_size": size.width, "num_hidden_layers": size.depth, "num_attention_heads": size.heads}


def _gpt_neo(size: Size) -> Case:
    """Local and global attention in turn; scores are not scaled."""
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        num_layers=size.depth,
        num_heads=size.heads,
        attention_types=[[["global", "local"][: min(size.depth, 2)], max(size.depth // 2, 1)]]
        if size.depth % 2 == 0 or size.depth == 1
        else [[["global"], size.depth]],
        window_size=8,
        max_position_embeddings=32,
        **_SPECIAL,
    )
    return Case(
        transformers.GPTNeoForCausalLM(config), {"input_ids": tokens(size.seed)}, ("transformer.h",), causal=True
    )


def _stablelm(size: Size) -> Case:
    """A quarter of each head is rotated."""
    config = transformers.StableLmConfig(
        vocab_size=VOCABULARY,
        intermediate_size=2 * size.width,
        num_key_value_heads=size.heads,
        **_sizes(size),
        **_SPECIAL,
    )
    return Case(transformers.StableLmForCausalLM(config), {"input_ids": tokens(size.seed)}, ("model.layers",), True)


def _electra(size: Size) -> Case:
    """Post-LN, an embedding of another width."""
    config = transformers.ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        intermediate_size=2 * size.width,
        max_position_embeddings=32,
        **_sizes(size),
    )
    model = transformers.ElectraForMaskedLM(config)
    return Case(model, {"input_ids": tokens(size.seed)}, ("electra.encoder.layer",))


def _pegasus(size: Size) -> Case:
    """Encoder and decoder, Pre-LN."""
    sides = {f"{side}_{word}": value for side in ("encoder", "decoder") for word, value in
             {"layers": size.depth, "attention_heads": size.heads, "ffn_dim": 2 * size.width}.items()}  # fmt: skip
    config = transformers.PegasusConfig(
        vocab_size=VOCABULARY,
        d_model=size.width,
        max_position_embeddings=32,
        scale_embedding=True,
        forced_eos_token_id=None,
        **sides,
    )
    batch = {"input_ids": tokens(size.seed), "decoder_input_ids": tokens(size.seed + 7)}
    stacks = ("model.encoder.layers", "model.decoder.layers")
    return Case(transformers.PegasusForConditionalGeneration(config), batch, stacks)


def _siglip(size: Size) -> Case:
    """Vision without a token of its own for the class."""
    config = transformers.SiglipVisionConfig(
        image_size=16, patch_size=4, intermediate_size=2 * size.width, **_sizes(size)
    )
    model = transformers.SiglipVisionModel(config)
    stack = next(name for name, module in model.named_modules() if name.endswith("layers"))
    return Case(model, {"pixel_values": images(size.seed)}, (stack,))


class Attention(nn.Module):
    """Causal, by einsum, rotated by location."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.norm = size.heads, nn.LayerNorm(size.width)
        self.to_qkv, self.to_out = nn.Linear(size.width, 3 * size.width, bias=False), nn.Linear(size.width, size.width)
        self.rotated, self.cut = (True, True), self.split

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.cut, self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        angle = torch.arange(x.shape[1])[:, None] * 0.1 ** torch.arange(q.shape[-1] // 2)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2) if wanted else y
            for y, wanted in zip((q, k), self.rotated, strict=True)
        )
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max).softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", weights, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Blocks are lists of attention and MLP, as many write them."""

    def __init__(self, size: Size):
        super().__init__()
        self.token_emb, wide = nn.Embedding(VOCABULARY, size.width), 4 * size.width
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    Attention(size),
                    nn.Sequential(
                        nn.LayerNorm(size.width), nn.Linear(size.width, wide), nn.GELU(), nn.Linear(wide, size.width)
                    ),
                ]
            )
            for _ in range(size.depth)
        )
        self.norm, self.to_logits = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token_emb(input_ids)
        for attention, mlp in self.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return self.to_logits(self.norm(x))


ARCHITECTURES: dict[str, Callable[[Size], Case]] = {
    "gpt-neo": _gpt_neo,
    "stablelm": _stablelm,
    "electra": _electra,
    "pegasus": _pegasus,
    "siglip": _siglip,
    "lists": lambda size: Case(Decoder(size), {"input_ids": tokens(size.seed)}, ("layers",), causal=True),
}


def _is_list(case: Case) -> bool:
    return isinstance(case.model, Decoder)


def _called(fault: Fault) -> Fault:
    """Only where a block is called, so that a hook can change what it gives."""
    return Fault(lambda case, stack, at: None if _is_list(case) else fault.plant(case, stack, at), noted=fault.noted)


def _norms(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if "Norm" in type(module).__name__]


def _mlp_without_shortcut(case: Case, stack: str, at: int):
    """x = mlp(norm(x)), the sum forgotten."""
    block = case.blocks(stack)[at][1]
    if isinstance(case.model, transformers.ElectraForMaskedLM):
        return None
    words = ("shortcut", "carry")
    if _is_list(case):
        block[1].register_forward_hook(lambda module, args, out: out - args[0])
        return words
    read: list[Tensor] = []
    _norms(block)[-1].register_forward_pre_hook(lambda module, args: read.append(args[0]))

    def without(module, args, out):
        x = out if isinstance(out, Tensor) else out[0]
        x = x - read.pop().view_as(x)
        return x if isinstance(out, Tensor) else (x, *out[1:])

    block.register_forward_hook(without)
    return words


def _norms_of_zero(case: Case, stack: str, at: int):
    """Weights of norms that start at zero instead of one."""
    for norm in _norms(case.blocks(stack)[at][1]):
        nn.init.zeros_(norm.weight)
    return ("zero", "norm", "unchanged")


def _large_epsilon(case: Case, stack: str, at: int):
    """LayerNorm(width, heads): the number of heads as epsilon."""
    for norm in _norms(case.blocks(stack)[at][1]):
        norm.eps = 4.0
    return ("eps", "norm")


def _output_left_out(case: Case, stack: str, at: int):
    """Attention returns before its output matrix."""
    block = case.blocks(stack)[at][1]
    names = ("out_proj", "o_proj", "to_out", "output.dense")
    name, module = next((n, m) for n, m in block.named_modules() if n.endswith(names) and "norm" not in n.lower())
    module.forward = lambda x: x
    return (name, "no gradient")


def _turned(case: Case, stack: str, at: int):
    """Queries are rotated by their locations, keys are not."""
    if not _is_list(case):
        return None
    case.blocks(stack)[at][1][0].rotated = (True, False)
    return ("position", "rotat", "keys")


def _cut_wrongly(case: Case, stack: str, at: int):
    """Heads are cut out without moving their axis."""
    if not _is_list(case):
        return None
    attention = case.blocks(stack)[at][1][0]
    attention.cut = lambda x: x.reshape(len(x), attention.heads, x.shape[1], -1)
    return ("heads", "future")


def _over_rows(case: Case, stack: str, at: int):
    """Attention of the other layout."""
    if not isinstance(case.model, transformers.ElectraForMaskedLM | transformers.SiglipVisionModel):
        return None
    block = case.blocks(stack)[at][1]
    forward = block.forward

    def changed(x, *args, **kwargs):
        out = forward(x.transpose(0, 1), *args, **kwargs)
        return out.transpose(0, 1) if isinstance(out, Tensor) else (out[0].transpose(0, 1), *out[1:])

    block.forward = changed
    return ("row",)


def _looks_back_only(case: Case, stack: str, at: int):
    """A causal mask in a model that is to read both ways."""
    if not isinstance(case.model, transformers.ElectraForMaskedLM):
        return None
    block = case.blocks(stack)[at][1]
    forward = block.forward

    def changed(x, *args, **kwargs):
        kwargs.pop("attention_mask", None)
        hidden = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)[None, None]
        return forward(x, attention_mask=hidden.expand(len(x), -1, -1, -1), **kwargs)

    block.forward = changed
    return ("mask", "future", "both ways")


def _tokens_of_one(case: Case, stack: str, at: int):
    """ids.clamp(max=1), as of a vocabulary that was given as 2."""
    table = next((m for m in case.model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None or table.num_embeddings != VOCABULARY:
        return None
    table.register_forward_pre_hook(lambda module, args: (args[0].clamp(max=1), *args[1:]))
    return ("token", "alike", "embedding", "same")


def _embedding_cut(case: Case, stack: str, at: int):
    """with torch.no_grad() around the embedding, so that it never learns."""
    if len(case.stacks) > 1:
        return None
    first = case.blocks(stack)[0][1]
    first = first[0] if _is_list(case) else first
    first.register_forward_pre_hook(
        lambda module, args, kwargs: (
            tuple(x.detach() if isinstance(x, Tensor) else x for x in args),
            {k: x.detach() if k == "hidden_states" else x for k, x in kwargs.items()},
        ),
        with_kwargs=True,
    )
    return ("embedding", "detach", "input")


def _mlp_shared(case: Case, stack: str, at: int):
    """One MLP for two blocks."""
    blocks = [block for _, block in case.blocks(stack)]
    if at == 0:
        return None
    if _is_list(case):
        blocks[at][1] = blocks[at - 1][1]
        return ("same weights", "share")
    for name in ("mlp", "fc1", "intermediate"):
        if hasattr(blocks[at], name):
            setattr(blocks[at], name, getattr(blocks[at - 1], name))
            return ("same weights", "share")
    return None


_IN_A_BLOCK: dict[str, Fault] = {
    "MLP without its shortcut": Fault(_mlp_without_shortcut),
    "norms of zero": Fault(_norms_of_zero),
    "epsilon of a norm is 4": Fault(_large_epsilon, noted=True),
    "output matrix left out": Fault(_output_left_out, noted=True),
    "keys not rotated": Fault(_turned, noted=True),
    "heads cut wrongly": Fault(_cut_wrongly),
    "rows for locations": Fault(_over_rows),
    "looks back only": Fault(_looks_back_only, noted=True),
    "tanh on the stream": _called(through(lambda before, x: torch.tanh(x), "activation", "shortcut", "factor")),
    "product for sum": _called(
        through(lambda before, x: before * (x - before), "shortcut", "carry", "drops", "factor")
    ),
    "stream clipped": _called(
        through(lambda before, x: x.clamp(-x.abs().mean(), x.abs().mean()), "activation", "shortcut", "clip", "clamp")
    ),
}
FAULTS: dict[str, Fault] = {
    **_IN_A_BLOCK,
    **{
        f"{name}, every block": Fault(everywhere(each).plant, whole=True, fixed=0, noted=each.noted)
        for name, each in _IN_A_BLOCK.items()
    },
    "tokens of one": Fault(_tokens_of_one, whole=True, fixed=0, noted=True),
    "embedding detached": Fault(_embedding_cut, whole=True, fixed=0, noted=True),
    "MLP shared by two blocks": Fault(_mlp_shared, noted=True),
}
