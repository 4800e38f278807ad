"""Networks that strangers bring: adapters, conditioning, blocks that hand on dicts, T before rows, half precision."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.inspection.inspect import inspect

WIDTH, LENGTH = 32, 12
IDS = torch.randint(2, 64, (3, LENGTH), generator=torch.Generator().manual_seed(0))


class SelfAttention(nn.Module):
    """One matrix for queries, keys and values."""

    masked = True

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.masked)
        return self.proj(y.transpose(1, 2).flatten(2))


class CausalSelfAttention(SelfAttention):
    """Says by its name what its mask is to be."""


class Block(nn.Module):
    def __init__(self, attention: type[SelfAttention] = SelfAttention):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Network(nn.Module):
    """Drawn as GPT-2's; blocks hand on what `pack` makes of the stream."""

    def __init__(self, depth: int = 4, block=Block, pack=lambda x: x, unpack=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.pack, self.unpack = pack, unpack
        self.table, self.positions = nn.Embedding(64, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(block() for _ in range(depth)), nn.Linear(WIDTH, 64)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor):
        x = self.pack(self.table(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.unpack(x)), x


class Adapted(nn.Module):
    """LoRA: the second of two small matrices starts at zero, beside one that is frozen."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.lora_A = base, nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize(("depth", "frozen"), [(1, True), (4, True), (4, False)])
def test_adapters_start_at_zero(depth, frozen):
    model = Network(depth)
    model.requires_grad_(not frozen)
    for block in model.blocks:
        block.attn.qkv, block.mlp[0] = Adapted(block.attn.qkv), Adapted(block.mlp[0])
    found = inspect(model, IDS)
    assert found.healthy
    assert not found.doubts
    if depth > 1:  # a product of two zeros does not learn
        nn.init.zeros_(model.blocks[2].attn.qkv.lora_A.weight)
        found = inspect(model, IDS).verdict
        assert found.text.startswith("attn.qkv.lora_A.weight of block 3 (blocks.2) is zero, unlike")
        assert "gives nothing" not in found.text


class Conditioned(Block):
    """DiT's: a condition scales and gates both branches, and starts at zero."""

    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, gate, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(4, -1)
        x = x + gate * self.attn(self.ln1(x) * (1 + scale))
        return x + gate_mlp * self.mlp(self.ln2(x) * (1 + scale_mlp))


class Diffusion(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.pos_embed = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 16, WIDTH))
        self.time, self.blocks = nn.Linear(1, WIDTH), nn.ModuleList(Conditioned() for _ in range(depth))
        self.final = nn.Linear(WIDTH, 48)
        for block in self.blocks:
            block.attn.masked = False
            nn.init.zeros_(block.modulation.weight)
            nn.init.zeros_(block.modulation.bias)
        for parameter in self.final.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, condition = self.patches(x).flatten(2).mT + self.pos_embed, self.time(t[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return self.final(x)


@pytest.mark.parametrize("depth", [1, 4])
def test_blocks_that_a_condition_gates_start_as_the_identity(depth):
    model, batch = Diffusion(depth), {"x": torch.randn(3, 3, 16, 16), "t": torch.rand(3)}
    found = inspect(model, batch)
    assert found.healthy
    assert not found.doubts
    for block in model.blocks:
        nn.init.normal_(block.modulation.weight)
    nn.init.ones_(model.pos_embed)
    assert any("does not see positions" in note for note in inspect(model, batch).doubts)


class OfDict(Block):
    def forward(self, state):
        return {"x": super().forward(state["x"]), "n": state["n"] + 1}


class OfDictInPlace(Block):
    def forward(self, state):
        state["x"] = super().forward(state["x"])
        return state


class OfSet(Block):
    def forward(self, state):
        (x,) = state
        return {super().forward(x)}


class OfPair(Block):
    def forward(self, state):
        return super().forward(state[0]), None


@pytest.mark.parametrize(
    ("block", "pack", "unpack"),
    [
        (OfDict, lambda x: {"x": x, "n": 0}, lambda state: state["x"]),
        (OfDictInPlace, lambda x: {"x": x}, lambda state: state["x"]),
        (OfPair, lambda x: (x, None), lambda state: state[0]),
    ],
)
def test_blocks_may_hand_on_a_dict_or_a_tuple(block, pack, unpack):
    plain, packed = inspect(Network(), IDS), inspect(Network(block=block, pack=pack, unpack=unpack), IDS)
    assert packed.healthy
    assert not packed.doubts
    for one, two in zip(plain.blocks, packed.blocks, strict=True):
        assert (one.cosine_mean, one.gradient_back, one.kept) == (two.cosine_mean, two.gradient_back, two.kept)


def test_what_blocks_hand_on_is_named_where_it_cannot_be_read():
    with pytest.raises(
        ValueError, match=r"reads or gives set, and no hidden state, \(batch, T, width\), is found in it"
    ):
        inspect(Network(block=OfSet, pack=lambda x: {x}, unpack=lambda state: next(iter(state))), IDS)


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_vectors_may_come_with_locations_first(rows):
    """Three rows are what probes take: the first three locations were taken for them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0)
    found = inspect(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(LENGTH, rows, WIDTH))
    assert found.healthy
    assert [note.partition(" hold")[0] for note in found.doubts] == [
        "Blocks 1 (layers.0), 2 (layers.1) and 3 (layers.2)"
    ]


@pytest.mark.parametrize("attention", [SelfAttention, CausalSelfAttention])
def test_a_mask_that_every_block_forgot_shows_where_a_name_asks_for_it(attention):
    def unmasked():
        block = Block(attention)
        block.attn.masked = False
        return block

    assert inspect(Network(block=lambda: Block(attention)), IDS).healthy
    found = inspect(Network(block=unmasked), IDS).verdict
    assert (found.kind, found.block) == (("leak", 1) if attention is CausalSelfAttention else ("preserved", None))
    both_ways = Network(block=unmasked)
    for block in both_ways.blocks:
        block.attn.causal = False
    assert inspect(both_ways, IDS).healthy


def test_a_parameter_is_named_before_what_it_does_to_earlier_blocks():
    """In half precision gradients before it come to zero."""
    model = Network().half()
    with torch.no_grad():
        model.blocks[2].mlp[2].weight *= 3e4
    found = inspect(model, IDS).verdict
    assert found.text.startswith("mlp.2.weight of block 3 (blocks.2) is 3e+04 times larger")


def test_norms_that_nothing_calls_do_not_excuse_a_stream_that_explodes():
    class Forgotten(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(x)
            return x + self.mlp(x)

    model = Network(24, Forgotten)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter *= 3.0
    found = inspect(model, IDS)
    assert found.verdict.text.startswith("Norms explode at block ")
    assert any("ln1.weight" in note and "get no gradient at all" in note for note in found.doubts)


@pytest.mark.parametrize(
    ("batch", "labels", "words"),
    [
        (
            IDS + 60,
            None,
            r"index out of range in self\): a row .* 12 locations, .* rows: table 64, positions 12; give ids",
        ),
        (torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8), None, "images are given as floats"),
        (IDS, torch.randn(3, LENGTH), "for a loss of another kind give loss="),
    ],
)
def test_what_a_model_cannot_read_is_said_in_a_sentence(batch, labels, words):
    with pytest.raises(ValueError, match=words):
        inspect(Network(), batch, labels=labels)


def test_constants_that_one_block_lacks_are_no_copies():
    model = Network()
    for block in model.blocks:
        block.decay = nn.Parameter(torch.arange(64.0).view(8, 8))
    with torch.no_grad():
        model.blocks[1].decay *= 20
    found = inspect(model, IDS)
    assert found.verdict.block == 2
    assert not any("hold the same" in note for note in found.notes)
