"""Inspection while a model trains: a callback for any loop, Trainer or Lightning."""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, cast

import numpy as np
from torch import nn

from skipless.inspection.evidence import Evidence
from skipless.inspection.gradients import gradients_held, weights_of
from skipless.inspection.hooks import Recorder, uncompiled
from skipless.inspection.inputs import DECODER_IDS, padding, rows_and_length
from skipless.inspection.inspect import at_fault, in_order, judged
from skipless.inspection.inspection import Inspection
from skipless.inspection.stacks import find_stacks
from skipless.inspection.statistics import InspectOptions


@contextmanager
def informed(model: nn.Module, recorder: Recorder) -> Generator[None]:
    """In here a recorder learns of the attention_mask and the ids of its first forward.

    Every module around the blocks is listened to, since a wrapper's own arguments may be anything.
    """

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if recorder.described:
            return
        accepted = signature(module.forward).parameters
        given = dict(zip(accepted, args, strict=False)) | kwargs
        if DECODER_IDS in accepted and "decoder" in recorder.blocks[0][0]:  # its ids may be made of labels further in
            given = {"input_ids": given.get(DECODER_IDS), "attention_mask": given.get("decoder_attention_mask")}
        options = recorder.options
        mask = padding(given) if options.mask is None else options.mask
        recorder.options = replace(options, mask=mask, batch_shape=options.batch_shape or rows_and_length(given))

    path = recorder.blocks[0][0].split(".")
    with ExitStack() as hooks:
        for depth in range(len(path)):
            around = model.get_submodule(".".join(path[:depth]))
            hooks.callback(around.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


logger = logging.getLogger("skipless")

Log = Callable[[int, dict[str, float]], None]


class SignalCallback:
    """Logs the signal of a training step every so often, at no more than `budget` of the training time.

        signal = SignalCallback(model, every=100)
        for step, batch in enumerate(batches):
            with signal.around(step):
                loss(model, batch).backward()
            optimizer.step(); optimizer.zero_grad()

    The first row of the step's own batch is measured by hooks that exist during that step only; padding is left out
    where the model is called with an attention_mask, (batch, T). The first call is always measured; a later one waits
    until all measuring, its own expected cost included, is within `budget` of the time since then; with budget=1
    none waits. Every stack of blocks is watched: metrics are of the one at fault, or of the longest.
    history holds (step, Inspection); log(step, metrics) goes to the "skipless" logger unless given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        log: Log | None = None,
        blocks: Sequence[str] | str | None = None,
        budget: float = 0.02,
    ):
        if every < 1:
            raise ValueError(f"every is {every}; it counts steps between measurements and must be at least 1")
        if not 0 < budget <= 1:
            raise ValueError(f"budget is {budget}; it is a share of the training time, such as 0.02")
        self.model, self.every, self.budget = model, every, budget
        self.stacks = find_stacks(model, blocks)
        self.log = log or _to_logger
        self.history: list[tuple[int, Inspection]] = []
        self.seconds = 0.0
        self._next, self._started, self._latest = 0, time.perf_counter(), 0.0
        self._recorders: list[Recorder] = []
        self._open = ExitStack()

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        """Around the forward and backward of one step."""
        self.start(step)
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        self.finish(step)

    def start(self, step: int) -> None:
        """Before a step's forward: set hooks, if it is time to measure."""
        self.cancel()
        now = time.perf_counter()
        if not self.history:
            self._started = now
        elif step < self._next or (self.budget < 1 and self._over_budget(now)):
            return
        if _compiled(self.model):
            self._open.enter_context(uncompiled(self.model))  # hooks do not run in compiled code
        options = InspectOptions(rows=1, picture=False, attention=False)
        self._recorders = [Recorder(stack, options, live=True) for stack in self.stacks]
        for recorder in self._recorders:
            self._open.enter_context(recorder)
            self._open.enter_context(informed(self.model, recorder))

    def _over_budget(self, now: float) -> bool:
        return self.seconds + self._latest > self.budget * (now - self._started)

    def finish(self, step: int) -> dict[str, float] | None:
        """After its backward, before gradients are cleared: take the hooks away, log, and return what was logged."""
        recorders = self._recorders
        self.cancel()
        if not recorders:
            return None
        complete = in_order(recorders)
        if not complete:
            reason = next((each.refused for each in recorders if each.refused), "not every block ran")
            logger.warning("step %d: %s, so its signal is not logged", step, reason)
            return None
        measuring = sum(each.watch.seconds for each in recorders)  # waits for a GPU's own work, which is not ours
        started = time.perf_counter()
        found = at_fault([self._found(each) for each in complete], recorders)
        self.history.append((step, found))
        self._next = step + self.every
        self._latest = measuring + time.perf_counter() - started
        self.seconds += self._latest
        metrics = summary(found)
        self.log(step, metrics)
        return metrics

    def _found(self, recorder: Recorder) -> Inspection:
        blocks = recorder.blocks
        gradients, weights = gradients_held(blocks), weights_of([block for _, block in blocks])
        signals = recorder.signals(gradients, weights)
        evidence = Evidence(self.model, blocks, signals, weights, [each.matrices for each in gradients])
        return judged(type(self.model).__name__, recorder, evidence)

    def cancel(self) -> None:
        """Take the hooks away without logging."""
        self._open.close()
        self._recorders = []


def summary(found: Inspection) -> dict[str, float]:
    """What a log line holds: extremes over depth of norms, cosine, rank, outliers and gradients; lost_block is the
    block that loses the signal, 1 also where it is lost before that, 0 while it is healthy."""
    blocks = found.blocks[1:]
    gradients = [each.gradient_mean for each in blocks if each.gradient_mean is not None]
    ratios = [each.query_key_gradient for each in blocks if each.query_key_gradient is not None]
    metrics = {
        "norm_min": min(each.norm_mean for each in blocks),
        "norm_max": max(each.norm_mean for each in blocks),
        "cosine_max": max(each.cosine_mean for each in blocks),
        "cosine_last": blocks[-1].cosine_mean,
        "effective_rank_min": min(each.effective_rank for each in blocks),
        "kurtosis_max": max(each.kurtosis for each in blocks),
        "outlier_max": max(each.outlier for each in blocks),
        "lost_block": float(found.verdict.block or 1) if found.verdict.lost else 0.0,
    }
    if gradients:
        metrics |= {"gradient_min": min(gradients), "gradient_max": max(gradients)}
    if ratios:
        metrics["query_key_gradient"] = float(np.median(ratios))
    return {f"signal/{name}": float(value) for name, value in metrics.items()}


def trainer_callback(**options: Any) -> Any:
    """A transformers TrainerCallback: Trainer(..., callbacks=[trainer_callback(every=100)]).

    options are SignalCallback's. Metrics join the Trainer's log history under the step's number. transformers' Trainer
    needs accelerate: pip install 'skipless[hf]'.
    """
    from transformers import TrainerCallback

    class SignalTrainerCallback(TrainerCallback):
        """SignalCallback around each training step of a Trainer."""

        signal: SignalCallback | None = None

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if self.signal is None:
                self.signal = SignalCallback(cast(nn.Module, model), **options)
            self.signal.start(state.global_step)

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            metrics = self.signal.finish(state.global_step) if self.signal is not None else None
            if metrics is not None:
                state.log_history.append({"step": state.global_step, **metrics})

        def on_train_end(self, args, state, control, **kwargs):
            if self.signal is not None:
                self.signal.cancel()

    return SignalTrainerCallback()


def lightning_callback(**options: Any) -> Any:
    """A Lightning Callback: Trainer(callbacks=[lightning_callback(every=100)]).

    Metrics go to the Trainer's loggers at the step they were measured, whatever log_every_n_steps is; log_dict, which
    would repeat them until the next measurement, only shows them to other callbacks.
    """
    base = _lightning_base()

    class SignalLightningCallback(base):
        """SignalCallback around each training batch of a Lightning Trainer."""

        signal: SignalCallback | None = None

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if self.signal is None:
                self.signal = SignalCallback(pl_module, **options)
            self.signal.start(trainer.global_step)

        def on_after_backward(self, trainer, pl_module):
            metrics = self.signal.finish(trainer.global_step) if self.signal is not None else None
            if metrics is not None:
                pl_module.log_dict(metrics, logger=False)
                for each in trainer.loggers:
                    each.log_metrics(metrics, step=trainer.global_step)

        def on_train_end(self, trainer, pl_module):
            if self.signal is not None:
                self.signal.cancel()

    return SignalLightningCallback()


def _lightning_base() -> Any:
    from importlib import import_module

    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("Lightning is not installed: pip install lightning", name="lightning")


def _compiled(model: nn.Module) -> bool:
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def _to_logger(step: int, metrics: Mapping[str, float]) -> None:
    logger.info("step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
