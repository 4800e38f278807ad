import numpy as np
import pytest
import torch
from torch import nn

from skipless.training.optim.soap import SOAP


class DenseSOAP:
    """The oracle: Adam on all entries as one vector, turned by one dense orthogonal matrix kron(Q_L, Q_R).

    Written from the paper's Algorithms 3 and 4 in numpy, without sharing code or layout with the optimiser.
    """

    def __init__(self, shape, rate, betas, eps, every, sides=(True, True)):
        self.rate, self.betas, self.eps, self.every, self.sides = rate, betas, eps, every, sides
        self.first, self.second = np.zeros(shape[0] * shape[1]), np.zeros(shape[0] * shape[1])
        self.left, self.right = np.zeros((shape[0],) * 2), np.zeros((shape[1],) * 2)
        self.basis = [np.eye(shape[0]), np.eye(shape[1])]
        self.updates = -1

    def step(self, weight, gradient):
        self.updates += 1
        moved = weight
        if self.updates > 0:
            turn = np.kron(*self.basis)
            rotated = turn.T @ gradient.ravel()
            self.first = self.betas[0] * self.first + (1 - self.betas[0]) * gradient.ravel()
            self.second = self.betas[1] * self.second + (1 - self.betas[1]) * rotated**2
            mean = turn.T @ self.first / (1 - self.betas[0] ** self.updates)
            square = self.second / (1 - self.betas[1] ** self.updates)
            moved = weight - self.rate * (turn @ (mean / (np.sqrt(square) + self.eps))).reshape(weight.shape)
        beta = self.betas[1]
        self.left = beta * self.left + (1 - beta) * gradient @ gradient.T
        self.right = beta * self.right + (1 - beta) * gradient.T @ gradient
        if self.updates == 0 or self.updates % self.every == 0:
            self.renew()
        return moved

    def renew(self):
        second = self.second.reshape(len(self.left), len(self.right))
        for side, matrix in enumerate((self.left, self.right)):
            if not self.sides[side]:
                continue
            if self.updates == 0:
                self.basis[side] = np.linalg.eigh(matrix)[1][:, ::-1]
                continue
            eigenvalues = np.diag(self.basis[side].T @ matrix @ self.basis[side])
            order = np.argsort(-eigenvalues, kind="stable")
            self.basis[side] = np.linalg.qr(matrix @ self.basis[side][:, order])[0]
            second = np.take(second, order, axis=side)
        self.second = second.ravel()


def gradients(shape, steps, seed=0):
    """Anisotropic noise, so that the bases matter."""
    generator = np.random.default_rng(seed)
    left, right = (generator.normal(size=(n, n)) for n in shape)
    return [left @ generator.normal(size=shape) @ right for _ in range(steps)]


def adopt_first_bases(oracle, state):
    """GGᵀ of one gradient may be singular and its eigenvectors then a matter of choice: check and take ours."""
    for side, (name, product) in enumerate((("left", oracle.left), ("right", oracle.right))):
        if oracle.sides[side]:
            ours = state[f"{name}_basis"].numpy().copy()
            np.testing.assert_allclose(ours.T @ ours, np.eye(len(ours)), atol=1e-12)
            np.testing.assert_allclose(ours.T @ product @ ours, np.diag(np.linalg.eigvalsh(product)[::-1]), atol=1e-9)
            oracle.basis[side] = ours


@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 6)])
@pytest.mark.parametrize("widest", [100, 5, 0])
def test_soap_is_the_dense_oracle_in_float64(shape, widest):
    generator = np.random.default_rng(1)
    weight = generator.normal(size=shape)
    sides = tuple(width <= widest for width in shape)
    oracle = DenseSOAP(shape, 0.03, (0.9, 0.95), 1e-8, 3, sides)
    parameter = nn.Parameter(torch.tensor(weight))
    settings = {"betas": (0.9, 0.95), "precondition_every": 3, "max_precondition_width": widest}
    optimizer = SOAP([parameter], lr=0.03, **settings)
    for index, gradient in enumerate(gradients(shape, 20)):
        weight = oracle.step(weight, gradient)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        if index == 0:
            adopt_first_bases(oracle, optimizer.state[parameter])
        np.testing.assert_allclose(parameter.detach().numpy(), weight, atol=1e-9)


def test_without_bases_soap_is_adamw_one_step_late():
    weight = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    soap = SOAP([ours], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, max_precondition_width=0)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for index, gradient in enumerate(gradients((4, 6), 12)):
        ours.grad = theirs.grad = torch.tensor(gradient)
        soap.step()
        if index > 0:
            adam.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_bases_stay_orthogonal_and_approach_the_eigenvectors():
    """Over a steady gradient covariance the power iterations diagonalise the averaged products."""
    parameter = nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))
    optimizer = SOAP([parameter], lr=0.0, betas=(0.9, 0.999), precondition_every=1)
    for gradient in gradients((6, 6), 300):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    state = optimizer.state[parameter]
    for side in ("left", "right"):
        basis, average = state[f"{side}_basis"], state[f"{side}_average"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12)
        turned = basis.T @ average @ basis
        assert (turned - turned.diag().diag()).norm() < 0.02 * turned.norm()


def final_loss(make, rate, steps=150):
    """½ tr(EᵀAEB) for E = W − W*, with A and B of condition 1000 in random bases: far from Adam's axes."""
    generator = torch.Generator().manual_seed(0)
    turns = [torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q for _ in range(2)]
    scales = torch.logspace(0, -3, 12, dtype=torch.float64)
    left, right = (q * scales @ q.T for q in turns)
    weight = nn.Parameter(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    optimizer = make([weight], rate)
    loss = weight.sum()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss = 0.5 * (weight * (left @ weight @ right)).sum()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_on_a_turned_ill_conditioned_quadratic_soap_beats_adam_at_either_s_best_rate():
    rates = [0.01, 0.03, 0.1, 0.3]
    adam = min(final_loss(lambda p, r: torch.optim.Adam(p, lr=r, betas=(0.9, 0.95)), rate) for rate in rates)
    soap = min(final_loss(lambda p, r: SOAP(p, lr=r, betas=(0.9, 0.95), precondition_every=1), rate) for rate in rates)
    assert soap < 0.1 * adam


def test_zero_gradients_leave_everything_finite_and_still():
    """As those of W_K while W_Q = 0: the products are 0 and any basis serves."""
    parameter = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    before = parameter.detach().clone()
    optimizer = SOAP([parameter], lr=0.1, precondition_every=1)
    for _ in range(4):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(parameter, before)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.isfinite().all()


def test_vectors_and_half_precision_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\); leave it to Adam"):
        SOAP([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="float32"):
        SOAP([nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))])


def test_matrices_in_one_batch_are_updated_as_each_alone(monkeypatch):
    """Of two shapes, one without gradients at first, and no more of a shape at a time than two."""
    from skipless.training.optim import soap as module

    monkeypatch.setattr(module, "_BATCH_ENTRIES", 2 * 6**2)
    shapes = [(4, 6), (5, 5), (4, 6), (4, 6), (4, 6)]
    weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    settings = {"lr": 0.03, "betas": (0.9, 0.95), "precondition_every": 3, "weight_decay": 0.1}
    together = [nn.Parameter(weight.clone()) for weight in weights]
    alone = [nn.Parameter(weight.clone()) for weight in weights]
    batched, singles = SOAP(together, **settings), [SOAP([parameter], **settings) for parameter in alone]
    for step in range(8):
        for index, shape in enumerate(shapes):
            gradient = None if index == 2 and step < 2 else torch.tensor(gradients(shape, 1, seed=10 * step + index)[0])
            together[index].grad, alone[index].grad = gradient, gradient
        batched.step()
        for single in singles:
            single.step()
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_bases_by_cholesky_give_the_same_updates(monkeypatch):
    """As on a GPU: columns of other signs, and eigenvalues moved by 1e-6 of the largest."""
    from skipless.training.optim import soap as optim_soap

    def trained():
        parameter = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
        optimizer = SOAP([parameter], lr=0.03, precondition_every=2)
        for gradient in gradients((8, 6), 30):
            parameter.grad = torch.tensor(gradient)
            optimizer.step()
        return parameter.detach()

    householder = trained()
    monkeypatch.setattr(optim_soap, "_many_at_once", lambda images: True)
    monkeypatch.setattr(torch.linalg, "qr", None)
    cholesky = trained()
    torch.testing.assert_close(cholesky, householder, rtol=0, atol=1e-3 * float(householder.abs().max()))


def test_renewing_after_each_step_is_renewing_in_it(tmp_path):
    """Bit for bit, also after the state has been saved and loaded between two renewals."""
    settings = {"lr": 0.03, "precondition_every": 3, "weight_decay": 0.1}
    weights = [torch.randn(4, 6), torch.randn(5, 5)]
    itself, left = ([nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    ours, theirs = SOAP(left, **settings), SOAP(itself, **settings)

    def leave_to_caller(optimizer):
        for group in optimizer.param_groups:
            group["renews_itself"] = False

    leave_to_caller(ours)
    assert not ours.begun
    ours.renew()  # before the first step there is nothing to renew
    for step in range(10):
        for index, weight in enumerate(weights):
            gradient = torch.tensor(gradients(weight.shape, 1, seed=10 * step + index)[0]).float()
            left[index].grad, itself[index].grad = gradient, gradient
        ours.step()
        ours.renew()
        theirs.step()
        assert ours.begun
        assert all(torch.equal(a, b) for a, b in zip(left, itself, strict=True))
        if step == 4:
            torch.save(ours.state_dict(), tmp_path / "state.pt")
            ours = SOAP(left, **settings)
            leave_to_caller(ours)
            ours.load_state_dict(torch.load(tmp_path / "state.pt"))
    for a, b in zip(left, itself, strict=True):
        assert all(torch.equal(ours.state[a][name], value) for name, value in theirs.state[b].items())
