"""docs/equations.md lists every numbered statement of the paper; those that no other test holds are held here.

The paper is not part of the repository. What it numbers is written down below, as its compiled text numbers it.
"""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.nn.attention import AttentionOptions, ShapedAttention
from skipless.theory import exponential, kernels, uniform
from skipless.theory.exponential import ExponentialStep
from skipless.theory.propagation import Attend, Residual, Skip
from skipless.theory.schemes import ExponentialSPA
from skipless.theory.shapes import ExponentialShape, PlainShape

PAGE = Path(__file__).resolve().parent.parent / "docs" / "equations.md"
# kind: the paper's labels, in order of their numbers; "" has none
NUMBERED = {
    "Eq.": [
        *("transformer_block", "standard_attn", "mha", "masked_attn"),  # Sec. 2
        *("attn_deep_rep_denseless", "attn_deep_cov_denseless", "", "attnmat", "simple_cov", "reveng_attn"),  # Sec. 3
        *("deep_cov_app", "", "deep_cov_avg", "simplified_avg_cov", ""),  # App. B
        *("rope", ""),  # App. E
        *("weighted_attn", "", "cross_terms", "", "", "diag_contrib", "shortcut_formula", "gamma_alpha", ""),  # App. F
        *("", "exp_Cholesky_factor", "thm3_geom_sum"),  # App. I
    ],
    "Theorem": ["uniform_c", "exp_c", "exp_c_analytic"],
    "Algorithm": ["expchol"],
    "Proposition": [""],
    "Corollary": ["", "", ""],
    "Definition": ["", "h_n"],
    "Lemma": ["chol_exp", "v_n", "g_n", "f_n"],
}
UNNUMBERED = ("Sec.", "App.")  # rows for what has a place and no number
PAIRS = st.tuples(st.floats(0.01, 0.9), st.floats(0.05, 0.95)).map(lambda p: (p[0], p[0] + (0.99 - p[0]) * p[1]))


def rows() -> list[list[str]]:
    """The cells of each row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| paper |" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_numbered_statement_is_listed_once() -> None:
    listed = []
    for kind, numbers in (row[0].split(" ", 1) for row in rows()):
        if kind not in UNNUMBERED:
            listed += [(kind, int(number)) for number in numbers.split(", ")]
    wanted = [(kind, number) for kind, labels in NUMBERED.items() for number in range(1, len(labels) + 1)]
    assert len(NUMBERED["Eq."]) == 29
    assert sorted(listed) == sorted(wanted)


def test_every_named_function_is_there() -> None:
    for statement, _, name, _ in rows():
        module, _, path = name.strip("`").rpartition(".")
        parts = [path]
        while True:  # a method's module lies one name further up
            try:
                found = importlib.import_module(f"skipless.{module}")
                break
            except ModuleNotFoundError:
                module, _, last = module.rpartition(".")
                assert module, f"{statement}: no {name}"
                parts.insert(0, last)
        for part in parts:
            found = getattr(found, part)
        assert callable(found), f"{statement}: {name}"
        assert re.match(r"`(nn|ops|model|theory)\.", name)


@pytest.mark.parametrize("shape", [PlainShape(causal=False), PlainShape(), ExponentialShape.between(0.4, 0.3, 0.02)])
def test_attention_is_the_papers_formula(shape) -> None:
    """Eqs. 2, 3, 4 and 10, letter by letter, with queries that are not 0 and Γ = 1e30."""
    torch.manual_seed(0)
    width, heads, length = 12, 3, 9
    module = ShapedAttention(width, heads, shape, options=AttentionOptions(position="none", impl="reference")).double()
    x = torch.randn(length, width).double()
    a = torch.as_tensor(shape.dense(length))
    d, mask = a.sum(-1, keepdim=True), (a > 0).double()
    b = torch.where(a > 0, (a / d).log(), 0.0)
    mixed = []
    for q, k, v in zip(
        *(f(x).split(width // heads, -1) for f in (module.query, module.key, module.value)), strict=True
    ):
        p = torch.softmax(mask * (q @ k.T / (width // heads) ** 0.5 + b) - 1e30 * (1 - mask), dim=-1)
        mixed.append(d * (p @ v))
    expected = torch.cat(mixed, -1) @ module.output.weight.T
    torch.testing.assert_close(module(x[None])[0], expected, rtol=0, atol=1e-12)


def test_a_network_of_attention_alone_is_one_product() -> None:
    """Eq. 5. W is the product of the blocks' value and output matrices."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=20, width=16, depth=5, heads=2, hidden=0, scheme=ExponentialSPA(0.05, 0.02))
    model, tokens = Transformer(config, impl="reference").double(), torch.randint(0, 20, (1, 12))
    attention, weights = torch.eye(12).double(), torch.eye(16).double()
    for block in model.blocks:
        inner = block.layers()[0]
        attention = torch.as_tensor(inner.shape.dense(12)) @ attention
        weights = weights @ inner.value.weight.T @ inner.output.weight.T
    torch.testing.assert_close(model.hidden(tokens)[0], attention @ model.embed(tokens)[0] @ weights)


@given(st.floats(1e-3, 5.0), st.floats(0.0, 0.3))
def test_the_mean_diagonal_is_that_of_the_mean_kernel(gamma, rate) -> None:
    """Eq. 14, and D̄ as its diagonal."""
    chol, ones = kernels.exponential_chol(gamma, 30), np.ones((30, 30))
    mean = kernels.exponential(gamma, 30) + rate * chol @ (ones - np.eye(30)) @ chol.T
    np.testing.assert_allclose(chol @ kernels.uniform(rate, 30) @ chol.T, mean, atol=1e-12)
    np.testing.assert_allclose(exponential.mean_diagonal(gamma, rate, 30), np.diagonal(mean), rtol=1e-12)


@pytest.mark.parametrize("width", [8, 200])
def test_cross_terms_cancel_over_the_sign_of_the_values(width) -> None:
    """Eqs. 18-22. W_V and −W_V are equally likely and their cross terms opposite, so the mean has none at any width."""
    rng, skip = np.random.default_rng(0), Skip.normalised(0.8)
    assert skip.residual == pytest.approx(0.6)
    shape = ExponentialShape.between(0.5, 0.3)
    x = rng.normal(size=(20, width))
    values = np.linalg.qr(rng.normal(size=(width, width)))[0]
    branch = shape.dense(20) @ x @ values
    both = [kernels.of_activations(0.8 * x + 0.6 * sign * branch) for sign in (1, -1)]
    predicted = Residual(Attend(shape), skip).forward(kernels.of_activations(x))
    np.testing.assert_allclose(np.mean(both, axis=0), predicted, atol=1e-12)
    cross = (both[0] - both[1]) / 2
    mixed = 0.8 * 0.6 * (x @ branch.T + branch @ x.T) / width
    np.testing.assert_allclose(cross, mixed, atol=1e-12)
    assert np.sqrt(np.mean(cross**2)) < 1.5 / np.sqrt(width)


def test_a_lone_cosine_shrinks_by_nu() -> None:
    """Eq. 23 in the paper's own example: two far locations alike, all others not; ν is λ_0² of no skips."""
    depth, alpha, gamma, first, second = 36, 0.9, 0.2, 20, 150
    rates = exponential.decay_rates(gamma, depth)
    kernel = np.eye(160)
    kernel[first, second] = kernel[second, first] = 0.4
    for block in (4, 20, 35):
        step = exponential.exponential_steps(gamma, depth, alpha)[block]
        nu = alpha**2 + (1 - alpha**2) * step.lam**2
        lam0 = kernels.innovation(rates[block + 1]) / kernels.innovation(rates[block])
        assert nu == pytest.approx(lam0**2, rel=1e-12)
        after = Residual(Attend(ExponentialShape(step)), Skip.normalised(alpha)).forward(kernel)
        assert after[first, second] == pytest.approx(nu * 0.4, abs=1e-6)


def test_the_first_column_of_theorem_3_s_proof() -> None:
    """Eq. 29: the sum over i of A_ki L_i1, term by term, is L'_k1. Locations from 1, as there."""
    g, h, length = 0.7, 0.3, 12
    ratio = kernels.innovation(h) / kernels.innovation(g)
    product = exponential.attention(ExponentialStep.between(g, h), 0.0, length) @ kernels.exponential_chol(g, length)
    for k in range(2, length + 1):
        i = np.arange(2, k)
        first = (np.exp(-h) - ratio * np.exp(-g)) * np.exp(-h * (k - 2)) + ratio * np.exp(-g * (k - 1))
        rest = ratio * (np.exp(-h) - np.exp(-g)) * np.exp(-h * (k - i - 1) - g * (i - 1))
        assert product[k - 1, 0] == pytest.approx(first + rest.sum(), rel=1e-12)
        assert product[k - 1, 0] == pytest.approx(np.exp(-h * (k - 1)), rel=1e-12)


def p(n, x):
    return 1.0 + n * x


def d(n, x):
    return (1.0 - x) * p(n, x) / p(n - 1, x)


@given(st.floats(0.01, 0.95), st.integers(1, 30))
def test_the_vector_of_ones_is_an_eigenvector(x, n) -> None:
    """Proposition 1 and Corollaries 1 to 3. d_n is the squared diagonal of L that follows from the third."""
    ones, inverse = np.ones(n), kernels.uniform_chol_inverse(x, n)
    np.testing.assert_allclose(kernels.uniform(x, n) @ ones, p(n - 1, x) * ones)
    np.testing.assert_allclose(inverse.T @ inverse @ ones, ones / p(n - 1, x), rtol=1e-9)
    np.testing.assert_allclose(inverse.T @ inverse @ (x * ones), x * ones / p(n - 1, x), rtol=1e-9)
    form = (x * ones) @ inverse.T @ inverse @ (x * ones)
    assert form == pytest.approx(n * x**2 / p(n - 1, x), rel=1e-9)
    assert kernels.uniform_chol(x, n + 1)[n, n] ** 2 == pytest.approx(1 - form, rel=1e-9)
    assert d(n, x) == pytest.approx(1 - form, rel=1e-9)


@given(PAIRS)
def test_the_proof_of_theorem_1_is_about_u_and_w(pair) -> None:
    """Definitions 1, 2 and Lemmas 2 to 4, entries counted from 0: v_n is row n of A, and g and f are in it."""
    x, y = pair
    length = 24
    column, row, _ = uniform.factors(x, y, length + 1)
    n = np.arange(length)
    root = np.sqrt((1 - x) * p(n, x) * p(n - 1, x) * (1 - y) * p(n, y) * p(n - 1, y))  # r_n(x) r_n(y)
    shortcut = np.sqrt(d(np.arange(length + 1), y) / d(np.arange(length + 1), x)) * x / p(np.arange(length + 1) - 1, x)
    f = x * y * (1 - y) / root + shortcut[1:] - shortcut[:-1]
    g = y * (1 - y) * p(n - 1, x) / root - shortcut[1:]
    np.testing.assert_allclose(f, row[:-1] - row[1:], atol=1e-13)
    np.testing.assert_allclose(g, column[:-1] + row[1:], atol=1e-13)
    assert (row[:-1] - row[1:] >= 0).all()
    assert (column[:-1] + row[1:] >= 0).all()
    for m in (1, 2, 7, length - 1):
        chols = kernels.uniform_chol_inverse(x, m), kernels.uniform_chol_inverse(y, m)
        v = chols[0].T @ chols[1] @ np.full(m, y)
        v -= np.sqrt(d(m, y) / d(m, x)) * chols[0].T @ chols[0] @ np.full(m, x)
        h = np.array([f[k + 1 : m].sum() for k in range(m)])
        np.testing.assert_allclose(v, g[:m] - h, atol=1e-11)
        np.testing.assert_allclose(v, column[:m] + row[m], atol=1e-11)
        assert (column[:m] + row[m] >= 0).all()
