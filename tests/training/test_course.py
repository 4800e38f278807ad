"""The numbers that a run goes by: the rate of each step, the smoothed loss, the pace, and what divergence leaves."""

import dataclasses

import numpy as np
import pytest
import torch

from skipless.training import trainer
from skipless.training.divergence import Diverged, GradientWatch, diagonal_warning
from skipless.training.run import Display, read_metrics
from skipless.training.trainer import Trainer, TrainStep, train


def expected_rate(step: int) -> float:
    """Of 24 steps the first four rise to 3e-4 and the last is at 0, as App. H writes them."""
    return 3e-4 * (step / 4 if step < 4 else 0.5 * (1.0 + np.cos(np.pi * (step - 4) / 20)))


@pytest.fixture
def steps(monkeypatch) -> list[tuple[int, float]]:
    """Each update's number, from 1, and the rate it was made at."""
    seen, honest = [], TrainStep.__call__

    def noted(self, step, batch):
        result = honest(self, step, batch)
        rates = {group["name"]: group["lr"] for group in self.optimizer.param_groups}
        seen.append((step + 1, rates["value"]))
        return result

    monkeypatch.setattr(TrainStep, "__call__", noted)
    return seen


@pytest.fixture
def every_step(experiment):
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, log_every=1))


def test_each_step_is_made_and_logged_at_the_schedule_s_rate(every_step, tmp_path, steps):
    train(every_step, tmp_path / "run", device="cpu", quiet=True)
    assert [step for step, _ in steps] == list(range(1, 25))
    logged = [record["rate"] for record in read_metrics(tmp_path / "run") if "loss" in record]
    expected = [expected_rate(step) for step in range(1, 25)]
    np.testing.assert_allclose([rate for _, rate in steps], expected, rtol=1e-12, atol=1e-19)
    np.testing.assert_allclose(logged, expected, rtol=1e-12, atol=1e-19)


def test_the_smoothed_loss_and_the_pace_are_those_of_the_steps(experiment, tmp_path, monkeypatch):
    paces = []
    monkeypatch.setattr(Display, "show", lambda self, line, pace: paces.append(pace))
    result = train(experiment, tmp_path / "run", device="cpu", quiet=True)
    assert np.median([4 * 32 / pace for pace in paces]) == pytest.approx(result.step_seconds)
    every = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, log_every=1, ema=0.3))
    result = train(every, tmp_path / "every", device="cpu", quiet=True)
    records = [record for record in read_metrics(tmp_path / "every") if "loss" in record]
    smoothed = records[0]["loss"]
    for record in records:
        smoothed = 0.7 * smoothed + 0.3 * record["loss"]
        assert record["ema"] == pytest.approx(smoothed, rel=1e-12)
    assert result.train_loss == pytest.approx(smoothed, rel=1e-12)


def poison(monkeypatch, *calls: int) -> None:
    """Make the loss of these calls NaN, or of all."""
    honest, seen = trainer.cross_entropy, []

    def failing(model, batch, packed):
        seen.append(1)
        return honest(model, batch, packed) * (torch.nan if not calls or len(seen) in calls else 1.0)

    monkeypatch.setattr(trainer, "cross_entropy", failing)


def halving(experiment):
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, on_divergence="halve-lr"))


def test_a_halved_rate_and_the_validation_outlive_a_stop(every_step, tmp_path, monkeypatch, steps):
    poison(monkeypatch, 9)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "stop_reason", lambda live, *_: KeyboardInterrupt if live.state.step == 14 else None)
        with pytest.raises(KeyboardInterrupt, match="after step 14"):
            train(halving(every_step), tmp_path / "run", device="cpu", quiet=True)
    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "stop_reason", lambda live, *_: KeyboardInterrupt if live.state.step == 16 else None)
        restored, honest = [], Trainer.start
        patch.setattr(Trainer, "start", lambda live: honest(live) or restored.append(live.state.valid))
        with pytest.raises(KeyboardInterrupt, match="after step 16"):
            train(halving(every_step), tmp_path / "run", resume=True, device="cpu", quiet=True)
    np.testing.assert_allclose(
        [rate for _, rate in steps], [0.5 * expected_rate(step) for step in (15, 16)], rtol=1e-12
    )
    valid = next(record for record in read_metrics(tmp_path / "run") if "valid_loss" in record)
    assert restored[0]["loss"] == valid["valid_loss"]


def test_a_run_that_always_diverges_ends(experiment, tmp_path, monkeypatch, caplog):
    poison(monkeypatch)
    with pytest.raises(Diverged, match="at step 1: loss nan"):
        train(halving(experiment), tmp_path / "run", device="cpu", quiet=True)
    assert caplog.text.count("Goes back to step 0") == 6


def test_a_gradient_s_usual_size_takes_ten_steps_to_know():
    watch = GradientWatch(window=20, factor=10.0)
    assert watch.see(0, 1.0) is None
    assert all(watch.see(step, 100.0) is None for step in range(1, 4))
    assert all(watch.see(step, 1.0) is None for step in range(4, 20))
    assert "50 times its recent median 1" in watch.see(20, 50.0)
    assert all(watch.see(step, 50.0) is None for step in range(21, 24))
    assert all(watch.see(step, 1.0) is None for step in range(24, 40))
    assert "50 times" in watch.see(40, 50.0)


def test_a_diagonal_may_leave_the_band_at_either_end():
    assert diagonal_warning(3, {"diagonal_min": 1e-3, "diagonal_max": 1e3}) is None
    assert "span [0.0009, 1]" in diagonal_warning(3, {"diagonal_min": 9e-4, "diagonal_max": 1.0})
    assert "span [1, 1.1e+03]" in diagonal_warning(3, {"diagonal_min": 1.0, "diagonal_max": 1.1e3})
