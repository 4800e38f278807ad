"""Adam in one pass: the kernel against torch's own update, with clipping and half-precision copies."""

import copy
import math

import pytest
import torch

from skipless.ops import gpu
from skipless.training.optim import adam
from skipless.training.optim.adam import FusedAdam, clip_factor, clip_gradients, supports_half_weights
from skipless.training.optim.half_weights import HalfWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(40, 64), (3,), (1,), (65, 63), (2048,), (50, 100), (1, 5000), (7,), (64, 32), ()]


@pytest.fixture
def kernel(monkeypatch):
    """The kernel, also where there is no GPU: in the interpreter; and without copies."""
    if not gpu.INSTALLED:
        pytest.skip("triton is not installed")
    monkeypatch.setattr(FusedAdam, "half_weights", HalfWeights(torch.nn.Module()))
    if DEVICE == "cpu":
        monkeypatch.setattr(adam, "kernel_supports", lambda group: True)


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(DEVICE).requires_grad_() for size in SIZES]


def give_gradients(several, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(several):
        noise = scale * torch.randn(parameter.shape, generator=generator).to(DEVICE)
        parameter.grad = None if index == 1 and step == 1 else noise  # whose count of steps then stays behind


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_kernel_is_torchs_update(kernel, decoupled, decay):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 1e-2, "weight_decay": decay, "decoupled_weight_decay": decoupled}
    one = FusedAdam(ours, **settings)
    other = torch.optim.Adam(theirs, foreach=False, **settings)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        one.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        for name, value in other.state[b].items():
            torch.testing.assert_close(one.state[a][name].cpu(), value.cpu(), rtol=2e-6, atol=1e-7)


def test_first_steps_are_corrected_without_cancelling(kernel):
    """After one step Adam moves by the rate itself, whatever β₂: 1 − β₂ᵗ must not lose its digits."""
    for beta in (0.9, 0.999, 0.99999):
        parameter = torch.zeros(100, device=DEVICE).requires_grad_()
        parameter.grad = torch.linspace(0.5, 2.0, 100, device=DEVICE)
        FusedAdam([parameter], lr=1.0, betas=(0.9, beta), eps=1e-30).step()
        torch.testing.assert_close(parameter.detach(), -torch.ones(100, device=DEVICE), rtol=3e-6, atol=0.0)


def test_scaled_gradients_are_those_of_clipping(kernel):
    ours, theirs = parameters(), parameters()
    one, other = FusedAdam(ours, lr=1e-2), torch.optim.Adam(theirs, lr=1e-2)
    for step in range(3):
        give_gradients(ours, step, scale=1e-3)
        give_gradients(theirs, step, scale=1e-3)
        norm, factor = clip_factor([p.grad for p in ours], 0.05)
        torch.testing.assert_close(norm, clip_gradients(theirs, 0.05))
        assert factor is not None
        assert factor < 1.0
        one.step(scale=factor)
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_without_a_limit_nothing_is_clipped_and_below_it_neither():
    several = parameters()
    give_gradients(several, 0)
    norm, factor = clip_factor([p.grad for p in several], None)
    assert factor is None
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in several))
    assert float(norm) == pytest.approx(exact, rel=1e-5)
    assert float(clip_factor([p.grad for p in several], 10.0 * exact)[1]) == 1.0


def test_the_norm_of_half_precision_gradients_is_summed_in_float32():
    parameter = torch.zeros(300, 300, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    parameter.grad = torch.full_like(parameter, 0.01)
    assert float(clip_factor([parameter.grad])[0]) == pytest.approx(300 * float(parameter.grad[0, 0]), rel=1e-4)


def test_what_the_kernel_does_not_serve_torch_does():
    assert not adam.kernel_supports({"params": [torch.zeros(2)]})
    assert not adam.kernel_supports({"params": [], "amsgrad": True})
    assert not supports_half_weights(FusedAdam([torch.zeros(2).requires_grad_()]))
    assert not supports_half_weights(torch.optim.SGD([torch.zeros(2).requires_grad_()], lr=0.1))
    ours, theirs = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    one, other = FusedAdam([ours], amsgrad=True), torch.optim.Adam([theirs], amsgrad=True)
    for optimizer in (one, other):
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.arange(5.0)
        optimizer.step()
    assert torch.equal(ours, theirs)


def test_a_step_calls_its_hooks_once_whoever_else_uses_torchs_adam():
    torch.optim.Adam(parameters())  # from here on Adam.step calls hooks too
    several, calls = parameters(), []
    optimizer = FusedAdam(several)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    give_gradients(several, 0)
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_state_moves_between_it_and_torchs_adam(kernel):
    ours, theirs = parameters(), parameters()
    one, other = FusedAdam(ours, lr=1e-2), torch.optim.Adam(theirs, lr=1e-2)
    for step in (0, 2):
        give_gradients(theirs, step)
        other.step()
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            a.copy_(b)
    for several, optimizer in ((ours, one), (theirs, other)):
        give_gradients(several, 3)
        optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


SCRIPT = """
import torch
from hopper import compiled, intercept
from skipless.ops.gpu import adam as adam_kernel

intercept(adam_kernel, "_update")
number = lambda: torch.zeros(())
def moments(half):
    value = torch.zeros(64, 64)
    low = torch.zeros(64, 64, dtype=torch.bfloat16)
    return adam_kernel.Moments(number(), value, low if half else torch.zeros(64, 64), torch.zeros(64, 64),
                               torch.zeros(64, 64), low.clone() if half else value)
constants = adam_kernel.Constants(number(), number(), (0.9, 0.999), 1e-8)
adam_kernel.update([moments(True)] * 10, constants)
adam_kernel.update([moments(False)], constants)
assert len(compiled) == 3, len(compiled)
for kernel in compiled:
    text = kernel.asm["ptx"]
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
"""


@pytest.mark.skipif(not gpu.INSTALLED, reason="triton is not installed")
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(on_hopper):
    on_hopper(SCRIPT)
