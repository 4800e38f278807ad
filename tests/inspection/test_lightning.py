"""The callback inside Lightning's own Trainer."""

import warnings

import pytest
import torch
from torch import nn

from skipless.inspection.callback import lightning_callback
from skipless.inspection.inspect import inspect
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning and its dependencies say while they are imported is not ours
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install lightning")

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    """A language model as a user would wrap it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = Transformer(ModelConfig(vocab_size=64, width=32, depth=6, heads=4, length=32))

    def training_step(self, batch, index):
        ids = batch[0]
        return nn.functional.cross_entropy(self.network(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Logged(lightning.loggers.logger.DummyLogger):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.lines: list[tuple[int, dict]] = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))


def train(module: Module, ids: torch.Tensor, steps: int, accumulate: int = 1):
    """Train through the real Trainer; the callback and the log."""
    callback, log = lightning_callback(every=2, budget=1.0), Logged()
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=log,
        callbacks=[callback],
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=2)
    trainer.fit(module, data)
    callback.seen = dict(trainer.callback_metrics)
    return callback, [line for line in log.lines if "signal/cosine_last" in line[1]]


def test_metrics_are_logged_and_true():
    ids = torch.randint(0, 64, (12, 32))
    module = Module()
    expected = inspect(module.network, ids[:1], labels=ids[:1])
    callback, lines = train(module, ids, steps=5)
    assert [step for step, _ in callback.signal.history] == [0, 2, 4]
    assert [step for step, _ in lines] == [0, 2, 4]
    assert lines[0][1]["signal/cosine_last"] == pytest.approx(expected.blocks[-1].cosine_mean, abs=1e-5)
    assert lines[0][1]["signal/lost_block"] == 0
    assert float(callback.seen["signal/cosine_last"]) == pytest.approx(lines[-1][1]["signal/cosine_last"], abs=1e-6)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_gradient_accumulation_counts_the_first_pass():
    callback, _ = train(Module(), torch.randint(0, 64, (12, 32)), steps=3, accumulate=2)
    assert [step for step, _ in callback.signal.history] == [0, 2]


def test_training_is_not_changed():
    ids, plain, watched = torch.randint(0, 64, (8, 32)), Module(), Module()
    train(watched, ids, steps=4)
    optimizer = plain.configure_optimizers()
    for index in range(4):
        plain.training_step((ids[2 * index : 2 * index + 2],), index).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, two in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)
