import json

import numpy as np
import pytest

from skipless.theory import kernels
from skipless.theory.activations import ShapedActivation
from skipless.theory.certificate import Thresholds, certify
from skipless.theory.local_maps import variance_gain
from skipless.theory.propagation import Attend, Chain, Mlp, Skip, sub_block
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA
from skipless.theory.shaping import dks, tat_leaky_relu

T = 100


def attention_only(scheme, depth, skip=None, norm="none"):
    skip = skip or Skip()
    alpha = skip.shortcut if skip.shortcut < 1 else 0.0
    return [sub_block(Attend(shape), skip, norm) for shape in scheme.shapes(depth, alpha)]


@pytest.mark.parametrize("base", ["tanh", "silu", "sigmoid", "softplus", "sin", "gelu_tanh"])
def test_norms_beyond_theory_s_reach_are_a_verdict_and_no_error(base):
    """A smooth activation at a scale where it is a kink; the reports end with the last block that can be followed."""
    usual, mlp = Skip(1.0, 1.0), sub_block(Mlp(ShapedActivation(base), 2.0), Skip(1.0, 1.0), "none")
    blocks = [Chain((each, mlp)) for each in attention_only(StandardAttention(), 36, usual)]
    certificate = certify(blocks, kernels.uniform(0.02, 20))
    assert certificate.verdict.kind == "explosion"
    assert 1 < len(certificate.reports) <= certificate.verdict.block + 1 < 12


def test_the_tanh_form_of_gelu_is_judged_like_gelu():
    blocks = {
        base: [
            Chain((each, Mlp(ShapedActivation(base), variance_gain(ShapedActivation(base)))))
            for each in attention_only(ExponentialSPA(0.005, 0.008), 36)
        ]
        for base in ("gelu", "gelu_tanh")
    }
    exact, tanh = (certify(each, kernels.uniform(0.008, 60)) for each in blocks.values())
    assert exact.verdict.kind == tanh.verdict.kind == "drift"
    assert exact.reports[-1].diagonal_max > 256.0
    assert tanh.reports[-1].diagonal_max == pytest.approx(exact.reports[-1].diagonal_max, rel=5e-3)


@pytest.mark.parametrize("scheme", [StandardAttention(), StandardAttention(alibi_heads=8)])
def test_standard_skipless_collapses_by_depth_25(scheme):
    certificate = certify(attention_only(scheme, 36), kernels.uniform(0.02, T))
    assert certificate.verdict.kind == "collapse"
    assert certificate.verdict.block <= 25
    assert certificate.reports[25].mean_cosine > 0.99
    before, at = certificate.reports[certificate.verdict.block - 1 : certificate.verdict.block + 1]
    assert before.mean_cosine <= 0.999 < at.mean_cosine
    assert f"block {certificate.verdict.block}" in certificate.verdict.text


@pytest.mark.parametrize(("skip", "norm"), [(Skip(), "pre"), (Skip(1.0, 1.0), "post")])
def test_norms_alone_do_not_help(skip, norm):
    blocks = attention_only(StandardAttention(alibi_heads=8), 100, skip, norm)
    verdict = certify(blocks, kernels.uniform(0.02, T), normalised=True).verdict
    assert verdict.kind == "collapse"


@pytest.mark.parametrize(
    ("scheme", "skip", "norm"),
    [
        (StandardAttention(alibi_heads=8), Skip(1.0, 1.0), "pre"),
        (StandardAttention(alibi_heads=8), Skip.normalised(0.98), "pre"),
        (UniformSPA(0.8, 0.02), Skip(), "none"),
        (ExponentialSPA(0.005, 0.02), Skip(), "none"),
        (ExponentialSPA(0.2, 0.02), Skip.normalised(0.98), "pre"),
    ],
)
def test_healthy_networks_pass_at_depth_100(scheme, skip, norm):
    depth = 36 if skip.shortcut == 0.98 and isinstance(scheme, ExponentialSPA) else 100
    blocks = attention_only(scheme, depth, skip, norm)
    certificate = certify(blocks, kernels.uniform(0.02, T), normalised=norm != "none")
    assert certificate.verdict.kind == "preserved"
    assert not certificate.verdict.lost


def test_appendix_f_drifts_and_exact_does_not():
    skip = Skip.normalised(0.98)
    drifting = certify(attention_only(ExponentialSPA(0.2), 36, skip), np.eye(512))
    assert drifting.reports[-1].diagonal_max == pytest.approx(11.2, abs=0.05)
    assert drifting.verdict.kind == "drift"
    assert "calibration='exact'" in drifting.verdict.text
    shapes = ExponentialSPA(0.2, calibration="exact").shapes(36, 0.98, length=512)
    exact = certify([sub_block(Attend(s), skip, "none") for s in shapes], np.eye(512))
    assert exact.verdict.kind == "preserved"
    assert exact.reports[-1].diagonal_max == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize(("activation", "low", "high"), [(dks("gelu", 36), 0.55, 1.0), (tat_leaky_relu(36), 1.0, 15.3)])
def test_full_vanilla_networks_drift_because_the_mlps_are_ignored(activation, low, high):
    """36 blocks at T = 512, r = .008: DKS lowers norms to about half, TAT raises them; neither loses the signal."""
    blocks = [Chain((Attend(s), Mlp(activation))) for s in ExponentialSPA(0.005, 0.008).shapes(36)]
    certificate = certify(blocks, kernels.uniform(0.008, 512))
    assert not certificate.verdict.lost
    assert certificate.reports[-1].mean_cosine < 0.995
    assert min(r.diagonal_min for r in certificate.reports) == pytest.approx(low, abs=0.01)
    assert max(r.diagonal_max for r in certificate.reports) == pytest.approx(high, abs=0.1)


def test_vanishing_and_exploding_norms_are_named():
    gelu = ShapedActivation("gelu")
    shrinking = certify([Mlp(gelu)] * 30, np.eye(T))
    assert shrinking.verdict.kind == "vanishing"
    growing = certify([Mlp(gelu, 4.0)] * 10, np.eye(T))
    assert growing.verdict.kind == "explosion"
    assert growing.verdict.block < 10


def test_gradient_limits_are_judged_too():
    blocks = [Mlp(ShapedActivation("gelu"), 0.5)] * 3
    verdict = certify(blocks, np.eye(T), normalised=True, thresholds=Thresholds(lost_gradient=10.0)).verdict
    assert verdict.kind == "vanishing"
    assert "Gradients" in verdict.text


@pytest.mark.parametrize(("gain", "kind"), [(0.5, "vanishing"), (3.0, "explosion")])
def test_gradients_are_lost_at_the_first_block_on_their_way_back(gain, kind):
    found = certify(
        [Mlp(ShapedActivation("gelu"), gain)] * 9, np.eye(T), normalised=True, thresholds=Thresholds(lost_gradient=30.0)
    )
    assert (found.verdict.kind, "Gradients" in found.verdict.text) == (kind, True)
    lost = [not 1 / 30 < report.backward_mean < 30 for report in found.reports]
    block = found.verdict.block
    assert 1 < block < 9
    assert (lost[block], lost[block + 1 :]) == (True, [False] * (9 - block))


def test_a_certificate_is_plain_data():
    certificate = certify(attention_only(ExponentialSPA(), 3), np.eye(T))
    data = json.loads(json.dumps(certificate.as_dict()))
    assert [r["block"] for r in data["reports"]] == [0, 1, 2, 3]
    assert data["verdict"]["kind"] == "preserved"


def test_two_neighbours_are_similar_by_design_and_one_is_refused():
    """At γ_L = .005 neighbours have cosine .995 however healthy the network."""
    certificate = certify(attention_only(ExponentialSPA(), 36), np.eye(2))
    assert certificate.verdict.kind == "preserved"
    with pytest.raises(ValueError, match="needs at least 2"):
        certify(attention_only(ExponentialSPA(), 2), np.eye(1))
