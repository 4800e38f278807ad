"""Training in float16: gradients neither vanish nor overflow, and are nearer to float32's than bfloat16's."""

import math

import pytest
import torch
from torch import nn

from skipless.data.loader import Batch
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.ops.cross_entropy import linear_cross_entropy
from skipless.ops.modes import autocast, loss_scale
from skipless.training import trainer
from skipless.training.config import OptimizerConfig, TrainConfig
from skipless.training.distributed import World
from skipless.training.divergence import Diverged, norms_by_block
from skipless.training.optim.adam import clip_factor
from skipless.training.optim.build import build_optimizer
from skipless.training.trainer import TrainStep, train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("tokens", "scale"), [(1, 1.0), (31, 1.0), (32, 2.0), (8191, 256.0), (8192, 512.0)])
def test_the_scale_is_the_power_of_two_below_a_sixteenth_of_the_tokens(tokens, scale):
    assert loss_scale("fp16", tokens) == scale
    assert loss_scale("bf16", tokens) == loss_scale("fp32", tokens) == 1.0


def step_of(precision: str, depth: int = 12, accumulate: int = 1) -> TrainStep:
    torch.manual_seed(0)
    config = preset("wikitext103/e-spa", width=64, heads=4, depth=depth, vocab_size=400, length=32)
    with DEVICE:
        model = Transformer(config, impl="sdpa")
    optimizer = build_optimizer(model, OptimizerConfig("adam", rate=1e-4, embedding_rate=1e-4))
    settings = TrainConfig(steps=50, warmup=5, length=32, batch_size=8, precision=precision, accumulate=accumulate)
    return TrainStep(model, optimizer, settings, World(0, 1, DEVICE), clip=None, packed=False)


def batch() -> Batch:
    return Batch(torch.randint(400, (8, 33), generator=torch.Generator().manual_seed(0))).to(DEVICE)


def gradients(step: TrainStep) -> torch.Tensor:
    step(0, batch())
    return torch.cat([p.grad.flatten().float() for p in step.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_leaves_the_gradients_of_float32_only_rounded(accumulate):
    exact = gradients(step_of("fp32"))
    errors = {}
    for precision in ("fp16", "bf16"):
        step = step_of(precision, accumulate=accumulate)
        errors[precision] = float((gradients(step) - exact).norm() / exact.norm())
        assert step.gradient_scale == 1.0
    assert errors["fp16"] < 0.01
    assert errors["fp16"] < errors["bf16"] / 4


def test_the_scale_is_of_the_tokens_that_go_backward_together(monkeypatch):
    seen = []
    monkeypatch.setattr(trainer, "loss_scale", lambda precision, tokens: seen.append(tokens) or 1.0)
    for accumulate in (1, 4):
        step_of("fp16", accumulate=accumulate)(0, batch())
    assert seen == [8 * 32, 2 * 32]


def test_gradients_that_float16_cannot_hold_unscaled_are_kept():
    """A mean over 2¹⁸ rows leaves little that float16 can hold: unscaled, rounding alone would cost over 1 %."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2**18, 8, generator=generator, dtype=torch.float64).to(DEVICE)
    weight = (0.3 * torch.randn(5, 8, generator=generator, dtype=torch.float64)).to(DEVICE)
    targets = torch.randint(5, (2**18,), generator=generator).to(DEVICE)
    exact, half = hidden.clone().requires_grad_(), hidden.to(torch.float16).requires_grad_()
    linear_cross_entropy(exact, weight, targets).backward()
    scale = loss_scale("fp16", 2**18)
    (linear_cross_entropy(half, weight.half(), targets) * scale).backward()
    assert exact.grad is not None
    assert half.grad is not None
    assert (exact.grad.half().double() - exact.grad).norm() / exact.grad.norm() > 0.01
    wrong = (half.grad.double() / scale - exact.grad).norm() / exact.grad.norm()
    assert wrong < 2e-3


def test_a_sum_over_rows_may_pass_what_float16_holds():
    hidden = torch.ones(2**17, 4, dtype=torch.float16, device=DEVICE)
    weight = torch.zeros(3, 4, dtype=torch.float16, device=DEVICE, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(2**17, dtype=torch.int64, device=DEVICE)).backward()
    expected = torch.tensor([-2 / 3, 1 / 3, 1 / 3])[:, None].expand(3, 4)
    torch.testing.assert_close(weight.grad, expected.to(DEVICE, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_has_the_gradients_of_float64_in_either_half(dtype):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(6, 7, 16), 0.5 * torch.randn(11, 16), torch.randn(11)
    targets = torch.randint(11, (6, 7))
    found = []
    for kind in (dtype, torch.float64):
        inputs = [t.to(kind).to(DEVICE).requires_grad_() for t in (hidden, weight, bias)]
        loss = linear_cross_entropy(inputs[0], inputs[1], targets.to(DEVICE), inputs[2], chunk=9)
        found.append([loss, *torch.autograd.grad(64 * loss, inputs)])
    for half, exact in zip(*found, strict=True):
        error = (half.double() - exact).norm() / exact.norm()
        assert error < (2e-3 if dtype == torch.float16 else 2e-2)


def test_the_factor_of_clipping_takes_the_scale_back():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = 1024.0 * torch.ones(4)
    for limit, expected in ((None, 1.0), (10.0, 1.0), (0.5, 0.25)):
        norm, factor = clip_factor([parameter.grad], limit, scale=1024.0)
        assert factor is not None
        assert float(norm) == 2.0
        assert float(factor) == pytest.approx(expected / 1024.0, rel=1e-6)


def test_autocast_is_off_in_full_precision():
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast(precision, DEVICE):
            assert nn.Linear(2, 2, device=DEVICE)(torch.ones(1, 2, device=DEVICE)).dtype == dtype


def test_norms_in_a_report_are_those_of_the_true_gradients():
    model = step_of("fp32").model
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 8.0)
    plain = norms_by_block(model)
    for parameter in model.parameters():
        parameter.grad *= 512.0
    assert norms_by_block(model, scale=512.0) == plain


def test_a_run_in_float16_trains_and_says_what_to_do_where_it_overflows(experiment, tmp_path, monkeypatch):
    half = experiment.override("train.precision=fp16")
    runs = {
        each.train.precision: train(each, tmp_path / each.train.precision, device="cpu", quiet=True)
        for each in (half, experiment)
    }
    assert runs["fp16"].train_loss == pytest.approx(runs["fp32"].train_loss, rel=2e-3)
    monkeypatch.setattr(trainer, "check_finite", _fail)
    with pytest.raises(Diverged, match=r"float16 ends at 65504: train\.precision=bf16"):
        train(half, tmp_path / "other", device="cpu", quiet=True)


def _fail(*_):
    raise Diverged(3, "diverged at step 3.")


def test_an_unknown_precision_is_named(experiment):
    with pytest.raises(ValueError, match="fp16"):
        experiment.override("train.precision=f16")
    assert math.isfinite(loss_scale("fp16", 2**20))
