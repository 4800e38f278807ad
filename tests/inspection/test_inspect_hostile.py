"""Models and batches that nobody meant to inspect: a result or one sentence, and the model is left as it was."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from skipless.inspection.inspect import inspect

IDS = torch.randint(2, 32, (2, 12), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Tower(nn.Module):
    """Three blocks; call: how each is called, give: what is made of the logits."""

    def __init__(self, call=lambda block, x: block(x), give=lambda logits: logits, depth: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.call, self.give = call, give
        self.table, self.positions = nn.Embedding(32, 16), nn.Parameter(torch.randn(12, 16))
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.table(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = self.call(block, x)
        return self.give(self.head(x))


@pytest.mark.parametrize(
    "give",
    [
        lambda logits: None,
        lambda logits: {},
        lambda logits: "text",
        lambda logits: logits.mean(),
        lambda logits: float(logits.detach().mean()),
        lambda logits: logits > 0,
        lambda logits: logits.to_sparse(),
        lambda logits: torch.complex(logits, logits),
        lambda logits: ([logits], {"n": 3}),
        lambda logits: (each for each in logits),
    ],
)
def test_what_a_model_gives_may_be_anything(give):
    found = inspect(Tower(give=give), IDS)
    assert found.healthy
    assert not found.doubts


def test_no_mode_of_autograd_around_an_inspection_matters():
    model = Tower()
    plain = inspect(model, IDS)
    with torch.no_grad():
        assert str(inspect(model, IDS)) == str(plain)
    with torch.inference_mode():
        assert str(inspect(model, IDS.clone())) == str(plain)
        made_here = IDS.clone()
    assert str(inspect(model, made_here)) == str(plain)


def test_parameters_without_values_or_gradients_are_refused_by_name():
    with torch.device("meta"):
        outline = Tower()
    with pytest.raises(ValueError, match="positions is on the meta device and has no values"):
        inspect(outline, IDS)
    with torch.inference_mode():
        inferring = Tower()
    with pytest.raises(ValueError, match=r"positions was made under torch.inference_mode\(\)"):
        inspect(inferring, IDS)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logits: logits, r"a tensor of \(2, 12, 32\)"),
        (lambda logits: 1.0, "is float"),
        (lambda logits: logits.mean().detach(), "detached from the model"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        inspect(Tower(), IDS, loss=loss)


def test_labels_of_a_detached_answer_are_refused():
    with pytest.raises(ValueError, match="what the model gives is detached from its parameters"):
        inspect(Tower(give=lambda logits: logits.detach()), IDS, labels=IDS)


def under_no_grad(block, x):
    with torch.no_grad():
        return block(x)


def test_a_block_that_runs_without_gradients_is_a_fault():
    found = inspect(Tower(call=under_no_grad), IDS)
    assert (found.verdict.kind, found.verdict.block) == ("vanishing", 1)
    assert "detached" in found.verdict.text


def test_blocks_that_run_again_on_the_way_back_are_refused_or_measured():
    assert inspect(Tower(call=lambda block, x: checkpoint(block, x, use_reentrant=False)), IDS).healthy
    with pytest.raises(ValueError, match="take use_reentrant=False"):
        inspect(Tower(call=lambda block, x: checkpoint(block, x, use_reentrant=True)), IDS)


def test_random_numbers_of_the_model_are_put_back_and_mislead_nobody():
    model = Tower(give=lambda logits: logits + torch.randn(1))
    state = torch.get_rng_state()
    found = inspect(model, IDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not found.doubts


def test_a_batch_without_tokens_says_how_many_it_has():
    with pytest.raises(ValueError, match="has 0 tokens per row"):
        inspect(Tower(), IDS[:, :0])
    with pytest.raises(ValueError, match="has 1 token per row"):
        inspect(Tower(), IDS[:, :1])


def test_einsum_may_be_given_its_operands_as_one():
    """As Longformer and LED do: what such a model sees was not asked."""
    model = Tower()
    for block in model.blocks:
        block.attention = Einsum(16)
    found = inspect(model, IDS)
    assert found.healthy
    assert not found.doubts


class Einsum(nn.Module):
    """Attention by sums over indices, with the arguments of nn.MultiheadAttention."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, query, key, value, need_weights=False):
        q, k, v = (
            made(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for made, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        scores = torch.einsum("bhqd,bhkd->bhqk", (q, k)) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bhkd->bhqd", (scores.softmax(-1), v)).transpose(1, 2).flatten(2), None


class Causal(Block):
    """causal: whether it looks back only."""

    causal = True

    def forward(self, x):
        y = self.norm(x)
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1) if self.causal else None
        return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]


class Across(Causal):
    """And reads what another stack gives."""

    def __init__(self):
        super().__init__()
        self.across = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, memory):
        x = super().forward(x)
        return x + self.across(x, memory, memory, need_weights=False)[0]


class Pair(Tower):
    """Two stacks, each with ids of its own, under names that do not tell which they are."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList([Across() for _ in range(3)])

    def forward(self, source, target):
        x, y = (self.table(ids) + self.positions[: ids.shape[1]] for ids in (source, target))
        for block in self.blocks:
            x = block(x)
        for block in self.others:
            y = block(y, x)
        return self.head(y)


def test_a_stack_is_asked_by_the_ids_that_enter_it():
    """Each location of the second sees all of the first one's ids, and no later one of its own."""
    model, batch = Pair(), (IDS, IDS.flip(0)[:, :10])
    for given in (batch, dict(zip(("source", "target"), batch, strict=True))):
        assert inspect(model, given).healthy
        assert inspect(model, given, blocks="others").healthy
    model.others[1].causal = False
    for source in (IDS, torch.full_like(IDS, 5)):  # of one token nothing can be asked
        found = inspect(model, (source, IDS.flip(0)[:, :10]))
        assert (found.verdict.kind, found.verdict.block, found.blocks[2].name) == ("leak", 2, "others.1")


class Ending(Pair):
    """Every source has to end with the same token, as where a summary is read from it."""

    def forward(self, source, target):
        if bool((source[:, -1] != source[0, -1]).any()):
            raise ValueError("every source must end with the same token.")
        return super().forward(source, target)


def test_a_decoder_is_asked_where_the_encoder_refuses_to_be():
    model, batch = Ending(), (IDS.where(torch.arange(12) < 11, 1), IDS.flip(0)[:, :10])
    found = inspect(model, batch)
    assert found.healthy
    (note,) = found.doubts
    assert note.endswith(
        "Whether it sees the future or other rows was not asked: every source must end with the same token."
    )
    model.others[1].causal = False
    found = inspect(model, batch)
    assert (found.verdict.kind, found.verdict.block, found.blocks[2].name) == ("leak", 2, "others.1")


def test_the_answer_of_a_decoder_is_not_held_against_the_encoder():
    """Whose locations hardly see each other where its outputs start at zero, while the decoder sees all of them."""
    model = Pair()
    for block in model.blocks:
        nn.init.zeros_(block.attention.out_proj.weight)
    assert not inspect(model, (IDS, IDS.flip(0))).doubts


@pytest.mark.parametrize("ids", [IDS % 2, (IDS % 2,)])
def test_tokens_may_be_bits(ids):
    model = Tower()
    model.blocks = nn.ModuleList([Causal() for _ in range(4)])
    assert inspect(model, ids).healthy
    model.blocks[2].causal = False
    found = inspect(model, ids)
    assert (found.verdict.kind, found.verdict.block) == ("leak", 3)


def test_positions_are_not_asked_for_where_no_location_sees_another():
    """As where attention's outputs start at zero, or so near to it that an order is lost in rounding."""
    model = Tower()
    for size, words in ((0.0, []), (1e-5, ["Locations hardly see each other"])):
        for block in model.blocks:
            nn.init.normal_(block.attention.out_proj.weight, std=size)
        assert [note.partition(":")[0] for note in inspect(model, IDS).doubts] == words
    nn.init.zeros_(model.positions)
    for block in model.blocks:
        nn.init.normal_(block.attention.out_proj.weight, std=0.3)
    assert any("does not see positions" in note for note in inspect(model, IDS).doubts)
