"""Power iterations on many matrices at once: against numpy one by one, and Cholesky's QR against Householder's."""

import numpy as np
import pytest
import torch

from skipless.training.optim.soap import eigenvectors, power_step, qr_by_cholesky


def averages(width, smallest, count=3, dtype=torch.float64):
    """(count, width, width) positive matrices in random bases, eigenvalues from 1 down to `smallest`."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.linalg.qr(torch.randn(count, width, width, generator=generator, dtype=torch.float64)).Q
    scales = torch.logspace(0, np.log10(smallest), width, dtype=torch.float64)
    return ((turns * scales) @ turns.mT).to(dtype)


def up_to_signs(basis, other):
    return (basis * other).sum(dim=-2).abs()


def off_orthogonal(bases):
    return float((bases.mT @ bases - torch.eye(bases.shape[-1], dtype=bases.dtype)).abs().max())


def test_eigenvectors_diagonalise_from_the_largest_down():
    matrices = averages(12, 1e-2)
    vectors = eigenvectors(matrices)
    expected = torch.diag_embed(torch.logspace(0, -2, 12, dtype=torch.float64).expand(3, 12))
    torch.testing.assert_close(vectors.mT @ matrices @ vectors, expected, rtol=0, atol=1e-12)


def test_power_step_is_numpy_s_qr_of_sorted_columns_one_matrix_at_a_time():
    matrices = averages(8, 1e-2)
    bases = torch.linalg.qr(torch.randn(3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    renewed, order = power_step(matrices, bases)
    for matrix, basis, ours, columns in zip(matrices, bases, renewed, order, strict=True):
        values = np.diag(basis.numpy().T @ matrix.numpy() @ basis.numpy())
        expected = np.argsort(-values, kind="stable")
        np.testing.assert_array_equal(columns, expected)
        theirs = np.linalg.qr(matrix.numpy() @ basis.numpy()[:, expected])[0]
        np.testing.assert_allclose(up_to_signs(ours, torch.tensor(theirs)), 1.0, atol=1e-12)


@pytest.mark.parametrize("width", [1, 16, 128])
def test_qr_by_cholesky_is_householder_s_up_to_signs_where_float32_can_tell(width):
    matrices = averages(width, 1e-3, dtype=torch.float32)
    bases = eigenvectors(averages(width, 1e-3) + 0.01 * averages(width, 1e-1).flip(0)).float()
    images = matrices @ bases
    ours = qr_by_cholesky(images, bases)
    assert off_orthogonal(ours) < 2e-6
    exact = torch.linalg.qr(images.double()).Q
    # δ moves the smallest eigenvalue by 1e-6‖P‖ / 1e-3
    np.testing.assert_allclose(up_to_signs(ours.double(), exact), 1.0, atol=2e-3)
    np.testing.assert_allclose(up_to_signs(ours.double(), exact)[:, : max(width // 2, 1)], 1.0, atol=1e-5)


@pytest.mark.parametrize("kind", ["zero", "of rank 1", "far below rounding"])
def test_qr_by_cholesky_stays_orthogonal_where_there_is_nothing_to_tell_columns_apart(kind):
    bases = torch.linalg.qr(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))).Q
    matrices = averages(64, 1e-30, count=2, dtype=torch.float32)
    if kind == "zero":
        matrices = torch.zeros_like(matrices)
    elif kind == "of rank 1":
        matrices = torch.ones_like(matrices)
    ours = qr_by_cholesky(matrices @ bases, bases)
    assert off_orthogonal(ours) < 2e-6
    if kind == "zero":
        torch.testing.assert_close(ours, bases, rtol=0, atol=1e-6)


def test_qr_by_cholesky_says_when_it_cannot():
    images = torch.full((1, 4, 4), float("nan"))
    assert qr_by_cholesky(images, torch.eye(4).unsqueeze(0)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 256])
def test_a_gpu_renews_bases_as_a_cpu_does(width):
    matrices = averages(width, 1e-3, dtype=torch.float32)
    bases = eigenvectors(averages(width, 1e-3) + 0.01 * averages(width, 1e-1).flip(0)).float()
    ours, order = power_step(matrices.cuda(), bases.cuda())
    theirs, expected = power_step(matrices, bases)
    torch.testing.assert_close(order.cpu(), expected)
    np.testing.assert_allclose(up_to_signs(ours.cpu(), theirs), 1.0, atol=2e-3)
