"""Every number of an inspection against its closed form or brute force."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from skipless.inspection.attention import AttentionStats, AttentionWatch
from skipless.inspection.gradients import members
from skipless.inspection.inspection import QUANTILES
from skipless.inspection.statistics import InspectOptions, describe
from skipless.theory import kernels


def test_statistics_equal_brute_force():
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)).double() * 2 + 0.3
    described = describe(x, InspectOptions(kernel=True))
    got = described.numbers()
    grams = [kernels.of_activations(row.numpy()) for row in x]
    pairs = [kernels.cosine(gram)[np.triu_indices(7, 1)] for gram in grams]
    assert got.norm_mean == pytest.approx(np.mean([np.diagonal(g).mean() for g in grams]))
    assert got.norm_min == pytest.approx(min(np.diagonal(g).min() for g in grams))
    assert got.norm_max == pytest.approx(max(np.diagonal(g).max() for g in grams))
    assert got.cosine_mean == pytest.approx(np.mean([kernels.mean_cosine(g) for g in grams]))
    assert got.cosine_quantiles == pytest.approx(np.mean([np.quantile(p, QUANTILES) for p in pairs], axis=0))
    assert got.effective_rank == pytest.approx(np.mean([kernels.effective_rank(g) for g in grams[:2]]))
    assert got.stable_rank == pytest.approx(np.mean([kernels.stable_rank(g) for g in grams[:2]]))
    assert got.collapse == pytest.approx(np.mean([kernels.rank_one_residual(g) for g in grams]))
    assert got.kurtosis == pytest.approx(np.mean([stats.kurtosis(row.numpy(), None, fisher=False) for row in x]))
    assert got.outlier == pytest.approx(max(float(row.abs().max() / row.square().mean().sqrt()) for row in x))
    assert got.norms == pytest.approx(np.mean([np.diagonal(g) for g in grams], axis=0))
    assert described.kernel.numpy() == pytest.approx(np.mean(grams, axis=0))
    assert got.picture == pytest.approx(kernels.cosine(grams[0]), abs=1e-6)


def test_closed_forms_at_the_ends():
    same = describe(torch.ones(1, 6, 4), InspectOptions()).numbers()
    assert (same.cosine_mean, same.effective_rank, same.stable_rank) == pytest.approx((1.0, 1.0, 1.0))
    assert same.collapse == pytest.approx(0.0, abs=1e-7)
    apart = describe(torch.eye(6)[None] * math.sqrt(6), InspectOptions()).numbers()
    assert (apart.cosine_mean, apart.effective_rank, apart.stable_rank) == pytest.approx((0.0, 6.0, 6.0))
    assert (apart.norm_mean, apart.collapse) == pytest.approx((1.0, math.sqrt(5 / 6)))


def test_padding_is_left_out():
    x = torch.randn(2, 6, 8)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    got = describe(x, InspectOptions(mask=mask)).numbers()
    each = [describe(x[:1, :4], InspectOptions()).numbers(), describe(x[1:], InspectOptions()).numbers()]
    assert got.cosine_mean == pytest.approx(np.mean([e.cosine_mean for e in each]))
    assert got.norms[:4] == pytest.approx((each[0].norms + each[1].norms[:4]) / 2)


def test_cosines_are_between_locations_that_are_not_zero():
    x = torch.randn(3, 6, 8).double()
    x[0, [0, 3]], x[1, 1:] = 0, 0
    got = describe(x, InspectOptions()).numbers()
    kept = [describe(x[:1, [1, 2, 4, 5]], InspectOptions()).numbers(), describe(x[2:], InspectOptions()).numbers()]
    assert got.cosine_mean == pytest.approx(np.mean([e.cosine_mean for e in kept]), rel=1e-12)
    assert got.cosine_quantiles == pytest.approx(np.mean([e.cosine_quantiles for e in kept], axis=0), rel=1e-12)
    assert got.norm_min == 0
    assert math.isnan(describe(x[1:2], InspectOptions()).numbers().cosine_mean)
    x[0, 1] = math.nan
    assert math.isnan(describe(x[:1], InspectOptions()).numbers().cosine_mean)


def test_zero_and_infinite_activations_give_numbers_not_errors():
    assert describe(torch.zeros(1, 3, 4), InspectOptions()).numbers().norm_mean == 0
    assert math.isnan(describe(torch.full((1, 3, 4), math.inf), InspectOptions()).numbers().effective_rank)


def brute(weights: torch.Tensor, keys: torch.Tensor) -> tuple[float, float, float]:
    """Entropy, spread and weight on the first key of (…, T, T) weights, over queries that see two keys or more."""
    choosing = keys > 1
    weights = weights.detach()
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)[..., choosing]
    return (
        float(entropy.mean()),
        float((entropy / keys[choosing].log()).mean()),
        float(weights[..., choosing, 0].mean()),
    )


@pytest.mark.parametrize("how", ["causal", "mask", "bias", "grouped", "softmax"])
def test_attention_equals_brute_force(how):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 8).double() for _ in range(3))
    visible = torch.ones(9, 9, dtype=torch.bool) if how == "bias" else torch.ones(9, 9, dtype=torch.bool).tril()
    bias = torch.randn(2, 1, 9, 9).double() if how == "bias" else torch.zeros(1).double()
    if how == "grouped":
        k, v = k[:, :2], v[:, :2]
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    weights = (q @ keys.mT / math.sqrt(8) + bias).masked_fill(~visible, -math.inf).softmax(-1)
    watch = AttentionWatch(lambda: 1)
    with watch:
        if how in ("causal", "grouped"):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=how == "grouped")
        elif how == "softmax":
            nn.Softmax(-1)((q @ k.mT / math.sqrt(8)).masked_fill(~visible, -math.inf))
        else:
            F.scaled_dot_product_attention(q, k, v, attn_mask=visible if how == "mask" else bias)
    got = AttentionStats.of(watch.found[1])
    assert (got.entropy, got.spread, got.first) == pytest.approx(brute(weights, visible.sum(-1).double()))


def test_attention_inside_torchs_own_module_is_seen():
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(16, 4, batch_first=True).double().eval(), torch.randn(2, 6, 16).double()
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    watch = AttentionWatch(lambda: 1)
    with watch:
        module(x, x, x, attn_mask=mask, need_weights=False)
    _, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    got = AttentionStats.of(watch.found[1])
    assert (got.entropy, got.spread, got.first) == pytest.approx(brute(weights, (~mask).sum(-1).double()))


def test_fused_matrices_are_cut_into_query_key_value():
    from transformers import GPT2Config, GPTNeoXConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    gpt2 = GPT2Block(GPT2Config(n_embd=16, n_head=4, attn_implementation="eager"), 0)
    neox = GPTNeoXLayer(GPTNeoXConfig(**sizes, attn_implementation="eager"), 0)
    for block, parameter, parts in (
        (gpt2, gpt2.attn.c_attn.weight, lambda w: w.split(16, dim=1)),
        (
            neox,
            neox.attention.query_key_value.weight,
            lambda w: [w.view(4, 3, 4, 16)[:, i].reshape(16, 16) for i in range(3)],
        ),
    ):
        member = next(m for m in members(block) if m.parameter is parameter)
        for (group, got), name, expected in zip(
            member.pieces(parameter), ("query", "key", "value"), parts(parameter), strict=True
        ):
            assert group == name
            assert torch.equal(got, expected)
    groups = {m.group for m in members(gpt2)}
    assert groups == {"fused", "output", "mlp", "norm"}
