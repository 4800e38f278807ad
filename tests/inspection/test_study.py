"""Networks followed by theory, and the data behind the paper's pictures."""

import numpy as np
import pytest

from skipless.inspection import studies
from skipless.inspection.studies import InputSignal, Network, study
from skipless.model.kernel_maps import certificate
from skipless.model.presets import preset
from skipless.theory import kernels as theory_kernels
from skipless.theory.certificate import Verdict
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA


@pytest.mark.parametrize("kind", ["sample", "average"])
def test_study_is_the_models_certificate(kind: str) -> None:
    signal = InputSignal(0.02, 30, kind)
    for network in studies.networks(depth=8, signal=signal):
        seen = study(network, signal)
        assert seen.certificate == certificate(network.config, signal.kernel())
        assert len(seen.states) == 9
        np.testing.assert_array_equal(seen.diagonals()[3], np.diagonal(seen.states[3]))


def test_every_block_is_passed_twice() -> None:
    passed = []
    study(Network("", studies.attention_only(ExponentialSPA(), 5, 20)), InputSignal(0, 20), lambda: passed.append(1))
    assert len(passed) == 10


def test_spa_kernels_of_the_average_input_are_the_designed_ones() -> None:
    """On Σ̄_0 U-SPA ends in Σ(ρ_L) exactly, and without repeats E-SPA in Σ(γ_L)."""
    signal = InputSignal(0.02, 40, "average")
    uniform = study(studies.networks(10, signal)[1], signal)
    np.testing.assert_allclose(uniform.states[-1], theory_kernels.uniform(0.8, 40), atol=1e-12)
    clean = InputSignal(0.0, 40)
    exponential = study(studies.networks(10, clean)[2], clean)
    np.testing.assert_allclose(exponential.states[-1], theory_kernels.exponential(0.005, 40), atol=1e-12)


def test_sampled_input_is_an_equality_matrix_at_its_rate() -> None:
    kernel = InputSignal(0.02, 2000, seed=3).kernel()
    assert set(np.unique(kernel)) == {0.0, 1.0}
    assert theory_kernels.mean_cosine(kernel) == pytest.approx(0.02, rel=0.05)
    np.testing.assert_array_equal(InputSignal(0.3, 8, "average").kernel(), theory_kernels.uniform(0.3, 8))


def test_the_seven_rows_of_fig_7() -> None:
    rows = [network.config for network in studies.networks()]
    usual = Skip(1.0, 1.0)
    assert [row.norm for row in rows] == ["none", "none", "none", "pre", "pre", "pre", "post"]
    assert [row.attention_skip for row in rows] == [*[Skip()] * 4, usual, Skip.normalised(0.98), usual]
    assert rows[1].scheme == UniformSPA(0.8, 0.02)
    assert rows[2].scheme == ExponentialSPA(0.005, 0.02)
    assert {rows[i].scheme for i in (0, 3, 4, 5, 6)} == {StandardAttention(alibi_heads=8)}
    assert {(row.depth, row.hidden, row.heads, row.length) for row in rows} == {(100, 0, 8, 100)}


def test_fig_6_golden_values() -> None:
    """Uncorrected diag(L Σ̄_0 Lᵀ) at (0-based) locations 50 and 99, T = 100, r = .05, γ_L = .02; corrected: 1."""
    average = InputSignal(0.05, 100, "average")
    plain, corrected = (study(network, average).diagonals()[-1] for network in studies.correction_networks())
    assert plain[50] == pytest.approx(3.19, abs=0.005)
    assert plain[99] == pytest.approx(4.78, abs=0.005)
    np.testing.assert_allclose(corrected, 1.0, atol=1e-12)


def test_fig_6_of_one_sequence_stays_near_one_when_corrected() -> None:
    signal = studies.CORRECTION_SIGNAL
    plain, corrected = (study(network, signal).diagonals() for network in studies.correction_networks())
    assert plain[-1].mean() > 2.5
    assert abs(corrected.mean(axis=1) - 1).max() < 0.1
    assert corrected.std(axis=1).max() < 0.3


def test_a_network_without_norms_left_has_no_cosines() -> None:
    seen = study(Network("", studies.attention_only(StandardAttention(), 2, 12)), InputSignal(0, 12))
    seen.states[1][0] = 0.0
    assert np.isnan(seen.normalised(1)).all()
    np.testing.assert_allclose(seen.normalised(2), theory_kernels.cosine(seen.states[2]))


@pytest.mark.parametrize("depth", [1, 2, 36, 100])
def test_default_blocks_lie_in_the_network(depth: int) -> None:
    blocks = studies.default_blocks(depth)
    assert blocks == sorted(set(blocks))
    assert blocks[0] == 0
    assert blocks[-1] == depth


def test_words() -> None:
    details = Network("", preset("wikitext103/e-spa-skip")).details()
    assert details == ["γ_L = 0.2", "α = 0.98, β = 0.199", "no norm", "gelu MLP"]
    assert Network("", preset("wikitext103/e-spa")).details()[-1] == "shaped gelu MLP"
    assert Network("", preset("c4/skip")).details()[-1] == "MLP α = 0.99, β = 0.141"
    assert Verdict("preserved", None, "").words == "preserved"
    assert Verdict("drift", 4, "").words == "drift from block 4"
    assert Verdict("collapse", 4, "").words == "collapse at block 4"
