"""Blocks that are written as a list of attention and MLP: one block each, with its name in the verdict."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import XLMConfig, XLMWithLMHeadModel

from skipless.inspection.ablation import rounding
from skipless.inspection.callback import SignalCallback
from skipless.inspection.inspect import inspect
from skipless.inspection.stacks import find_blocks, find_stacks

WIDTH, LENGTH, VOCABULARY = 32, 12, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.to_qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(x)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Network(nn.Module):
    """Members of a block are called one by one, and the shortcuts are added here."""

    def __init__(self, depth: int = 6, kind: str = "list", head: bool = True):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions()
        pairs = [(Attention(), FeedForward()) for _ in range(depth)]
        if kind == "dict":
            self.layers = nn.ModuleList(nn.ModuleDict({"attn": attn, "ff": ff}) for attn, ff in pairs)
        elif kind == "sequential":
            self.layers = nn.ModuleList(nn.Sequential(Residual(attn), Residual(ff)) for attn, ff in pairs)
        else:
            self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)) if head else None

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.positions(self.embedding(input_ids))
        for block in self.layers:
            if isinstance(block, nn.Sequential):
                x = block(x)
                continue
            attn, ff = block.values() if isinstance(block, nn.ModuleDict) else block
            x = x + attn(x)
            x = x + ff(x)
        return x if self.head is None else self.head(x)


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def network(kind: str = "list", **options) -> Network:
    torch.manual_seed(0)
    return Network(kind=kind, **options)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_list_gives_the_numbers_of_a_block_that_is_called(kind, ids):
    one, two = inspect(network(kind), ids), inspect(network("sequential"), ids)
    assert [each.name for each in one.blocks] == ["input", *(f"layers.{index}" for index in range(6))]
    for each, other in zip(one.blocks, two.blocks, strict=True):
        for number in ("norm_mean", "cosine_mean", "effective_rank", "gradient_mean"):
            assert getattr(each, number) == pytest.approx(getattr(other, number), rel=1e-4), number
    assert one.blocks[3].attention_spread == pytest.approx(two.blocks[3].attention_spread, rel=1e-5)
    assert one.healthy
    assert not one.notes


def test_the_last_block_ends_where_the_model_does(ids):
    model = network(head=False)
    found = inspect(model, ids)
    with torch.no_grad():
        given = model(ids)
    assert found.blocks[-1].norm_mean == pytest.approx(float(given.square().mean()), rel=1e-5)


@pytest.mark.parametrize(("kind", "label"), [("list", "0.to_out.weight"), ("dict", "attn.to_out.weight")])
def test_a_fault_is_named_with_its_list(kind, label, ids):
    model = network(kind)
    nn.init.zeros_(dict(model.layers[3].named_parameters())[label])
    assert inspect(model, ids).verdict.text.startswith(f"{label} of block 4 (layers.3) is zero")


def test_faults_between_the_members_are_seen(ids):
    model = network()
    model.layers[2][1].register_forward_hook(lambda module, args, out: out - args[0])
    assert "Block 3 (layers.2) does not carry its input on" in inspect(model, ids).verdict.text
    model = network()
    model.layers[4][0].register_forward_hook(lambda module, args, out: out * torch.nan)
    assert inspect(model, ids).verdict.text == "Activations are not finite at block 5 (layers.4)."


def test_no_hook_is_left(ids):
    model = network()
    inspect(model, ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_rounding_and_the_callback_take_lists_too(ids):
    model = network()
    shares = rounding(model, ids, "bf16")
    assert len(shares) == 6
    assert all(0 < share < 0.1 for share in shares)
    logged = []
    callback = SignalCallback(model, every=1, log=lambda step, metrics: logged.append(metrics))
    with callback.around(0):
        model(ids).square().mean().backward()
    assert logged[0]["signal/lost_block"] == 0
    assert len(callback.history[0][1].blocks) == 7


def test_blocks_beside_other_things_in_one_sequential(ids):
    """Also where a block is Sequential(attention, mlp), which is no stack of its own."""
    blocks = [nn.Sequential(Residual(Attention()), Residual(FeedForward())) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Positions(), *blocks, nn.LayerNorm(WIDTH))
    assert [name for name, _ in find_blocks(model)] == ["2", "3", "4", "5"]
    assert inspect(model, ids).healthy
    alone = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Positions(), blocks[0], nn.LayerNorm(WIDTH))
    assert [[name for name, _ in stack] for stack in find_stacks(alone)] == [["2"]]
    assert inspect(alone, ids).healthy


def test_a_plain_list_is_refused_with_its_name():
    model = network()
    blocks = list(model.layers)
    del model.layers
    model.layers = blocks
    with pytest.raises(ValueError, match=r"layers of Network is a plain list of modules.*nn\.ModuleList\(layers\)"):
        find_stacks(model)


class Zipped(nn.Module):
    """Attention and MLPs in two lists, called in one loop, as in XLM."""

    def __init__(self, depth: int = 6):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions()
        self.attentions = nn.ModuleList(Attention() for _ in range(depth))
        self.mlps = nn.ModuleList(FeedForward() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embedding(ids))
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


def test_lists_that_are_zipped_are_one_stack():
    torch.manual_seed(0)
    model, ids = Zipped(), torch.randint(0, VOCABULARY, (3, LENGTH))
    (blocks,) = find_stacks(model)
    assert [name for name, _ in blocks] == [f"attentions.{index}" for index in range(6)]
    assert [name for name, _ in blocks[0][1].named_children()] == ["attentions", "mlps"]
    states = []
    model.attentions[3].register_forward_pre_hook(lambda module, args: states.append(args[0].detach()))
    found = inspect(model, ids)
    assert found.healthy
    assert found.doubts == ()
    assert found.blocks[3].norm_mean == pytest.approx(float(states[0].square().mean()), rel=1e-5)
    nn.init.zeros_(model.mlps[4].net[3].weight)
    verdict = inspect(model, ids).verdict
    assert (verdict.kind, verdict.block) == ("vanishing", 5)
    assert verdict.text.startswith("mlps.net.3.weight of block 5 (attentions.4) is zero")


def test_xlm_is_read_as_blocks():
    sizes = {"emb_dim": 32, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 32}
    model = XLMWithLMHeadModel(XLMConfig(vocab_size=VOCABULARY, **sizes))
    found = inspect(model, torch.randint(3, VOCABULARY, (3, LENGTH)))
    assert found.healthy
    assert [each.name for each in found.blocks[1:]] == [f"transformer.attentions.{index}" for index in range(4)]
    assert {"query", "mlp", "norm"} <= set(found.blocks[1].parameter_gradients)
