"""E-SPA on a grid of locations: its kernel, its attention, and what it has no answer to."""

import math

import numpy as np
import pytest

from skipless.theory import kernels
from skipless.theory.exponential import ExponentialStep
from skipless.theory.feasibility import grid_sides
from skipless.theory.schemes import ExponentialSPA, Scheme
from skipless.theory.shapes import SymmetricExponentialShape

STEPS = [(math.inf, 1.0), (math.inf, 0.2), (1.0, 0.7), (0.25, 0.2)]
GRIDS = [(2, 3), (3, 2), (8, 8), (1, 7), (7, 1), (1, 1)]


def attention(grid, gamma_in: float, gamma_out: float, repeat_rate: float = 0.0) -> np.ndarray:
    length = grid[0] * grid[1]
    return SymmetricExponentialShape(ExponentialStep.between(gamma_in, gamma_out), repeat_rate, grid=grid).dense(length)


def test_the_kernel_is_that_of_distances_along_rows_and_columns():
    rows, columns = 3, 5
    kernel = kernels.exponential_grid(0.3, rows, columns)
    for i in range(rows * columns):
        for j in range(rows * columns):
            apart = abs(i // columns - j // columns) + abs(i % columns - j % columns)
            assert kernel[i, j] == pytest.approx(math.exp(-0.3 * apart), rel=1e-15)
    np.testing.assert_array_equal(kernels.exponential_grid(math.inf, rows, columns), np.eye(15))


@pytest.mark.parametrize("gammas", STEPS)
@pytest.mark.parametrize("grid", GRIDS)
def test_attention_carries_one_kernel_to_the_other(grid, gammas):
    """A Σ(γ) Aᵀ = Σ(γ'), no entry below 0."""
    matrix = attention(grid, *gammas)
    before, after = (kernels.exponential_grid(gamma, *grid) for gamma in gammas)
    assert np.abs(matrix @ before @ matrix.T - after).max() < 1e-12
    assert (matrix >= 0.0).all()


@pytest.mark.parametrize("gammas", STEPS)
@pytest.mark.parametrize("grid", GRIDS)
def test_its_factors_make_the_symmetric_root_of_the_whole_kernel(grid, gammas):
    roots = [kernels.symmetric_root(kernels.exponential_grid(gamma, *grid)) for gamma in gammas]
    np.testing.assert_allclose(attention(grid, *gammas), np.linalg.solve(*roots).T, atol=1e-12)


@pytest.mark.parametrize("repeat_rate", [0.0, 0.148])
@pytest.mark.parametrize("gammas", STEPS)
def test_a_single_row_or_column_is_a_line(gammas, repeat_rate):
    step = ExponentialStep.between(*gammas)
    line = SymmetricExponentialShape(step, repeat_rate).dense(9)
    for grid in ((1, 9), (9, 1)):
        np.testing.assert_allclose(attention(grid, *gammas, repeat_rate), line, atol=1e-14)
    square = SymmetricExponentialShape(step, repeat_rate, grid="square").dense(9)
    np.testing.assert_array_equal(square, attention((3, 3), *gammas, repeat_rate))


def test_four_places_by_hand():
    """With e^{−γ} = .6 the root of two places is [[3, 1], [1, 3]]/√10, and of four its Kronecker square."""
    golden = [[0.9, 0.3, 0.3, 0.1], [0.3, 0.9, 0.1, 0.3], [0.3, 0.1, 0.9, 0.3], [0.1, 0.3, 0.3, 0.9]]
    np.testing.assert_allclose(attention((2, 2), math.inf, -math.log(0.6)), golden, atol=1e-14)


@pytest.mark.parametrize("repeat_rate", [0.0, 0.148, 0.6])
@pytest.mark.parametrize("grid", [(4, 6), (5, 5)])
def test_every_block_keeps_the_average_kernel_at_a_unit_diagonal(grid, repeat_rate):
    """And reaches the cosines of R Σ̄_0 R, R the root of its target, which is App. B's correction."""
    length = grid[0] * grid[1]
    average, product = kernels.uniform(repeat_rate, length), np.eye(length)
    for shape in ExponentialSPA(0.3, repeat_rate, grid=grid).shapes(12, causal=False, length=length):
        product = shape.dense(length) @ product
        root = kernels.symmetric_root(kernels.exponential_grid(shape.step.gamma_out, *grid))
        target = kernels.cosine(root @ average @ root)
        np.testing.assert_allclose(product @ average @ product.T, target, atol=1e-12)


def test_app_c_spreads_the_loss_evenly_over_blocks_on_a_grid_too():
    """log det Σ falls by the same amount in each of them: it is linear in log a², whatever the grid."""
    shapes = ExponentialSPA(0.3, grid=(4, 6)).shapes(6, causal=False)
    volumes = [np.linalg.slogdet(kernels.exponential_grid(shape.step.gamma_out, 4, 6))[1] for shape in shapes]
    np.testing.assert_allclose(np.diff([0.0, *volumes]), volumes[0], rtol=1e-10)
    lost = (4 - 1) * 6 + 4 * (6 - 1)
    assert volumes[-1] == pytest.approx(lost * math.log(-math.expm1(-0.6)), rel=1e-12)


@pytest.mark.parametrize(("calibration", "repeat_rate"), [("exact", 0.1), ("mlp-aware", 0.0)])
def test_calibrations_know_the_grid(calibration, repeat_rate):
    """With MLPs that leave a kernel as it is both must give what the paper's gives."""
    plain, calibrated = (
        ExponentialSPA(0.5, repeat_rate, calibration=kind, grid=(3, 4)).shapes(
            4, causal=False, length=12, mlp=lambda kernel: kernel
        )
        for kind in ("paper", calibration)
    )
    for expected, found in zip(plain, calibrated, strict=True):
        np.testing.assert_allclose(found.dense(12), expected.dense(12), atol=1e-12)


def test_json():
    assert "grid" not in ExponentialSPA().to_dict()
    for grid in ((3, 4), "square"):
        scheme = ExponentialSPA(0.5, grid=grid)
        assert Scheme.from_dict(scheme.to_dict()) == scheme
    assert ExponentialSPA(grid=(3, 4)).to_dict()["grid"] == [3, 4]
    assert ExponentialSPA(grid=(np.int64(3), 4)).to_dict()["grid"] == [3, 4]
    assert ExponentialSPA(0.5, grid="square").describe() == "γ_L = 0.5, by row and column"


@pytest.mark.parametrize("grid", ["round", (3,), (0, 4), (2.5, 4), (True, 4), 8, (2, 2, 2)])
def test_grids_that_are_none(grid):
    with pytest.raises(ValueError, match=r"grid is .*; it must be \(rows, columns\), both at least 1, or 'square'"):
        ExponentialSPA(grid=grid)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ExponentialSPA(grid="square").shapes(2), "grid='square' with causal=True.*use causal=False"),
        (lambda: ExponentialSPA(0.2, grid=(2, 2)).shapes(2, 0.3, causal=False), "skip_weight=0.3.*use skip_weight=0"),
        (lambda: ExponentialSPA(grid="square").shapes(2, causal=False, length=63), "63 .* the nearest that do are 64"),
        (lambda: grid_sides("square", 71), "the nearest that do are 64"),
        (lambda: grid_sides((4, 8), 64), r"has 32 locations, and length is 64; use length=32, or grid=\(8, 8\)"),
        (lambda: grid_sides((4, 8), 63), "length is 63; use length=32$"),
        (lambda: ExponentialSPA(grid=(2, 3)).shapes(1, causal=False)[0].dense(7), "has 6 locations"),
    ],
)
def test_what_a_grid_has_no_answer_to(call, words):
    with pytest.raises(ValueError, match=words):
        call()
