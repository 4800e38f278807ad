"""The training loop: from an Experiment and a folder to a trained network, through kills and resumptions."""

import json
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from skipless.data.tokenizer import MODEL_FILE
from skipless.train.checkpoint import save_weights
from skipless.train.config import Experiment
from skipless.train.distributed import join_world, plain
from skipless.train.divergence import Diverged, GradientWatch, check_finite, diagonal_warning
from skipless.train.evaluate import EvalResult, evaluate_loss
from skipless.train.interrupt import StopRequest
from skipless.train.log import Board, Line
from skipless.train.optim import warmup_cosine
from skipless.train.probe import measure
from skipless.train.run import RunFolder
from skipless.train.session import Session, open_session
from skipless.train.step import TrainStep

logger = logging.getLogger("skipless")
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Result:
    """How a run ended: the smoothed training loss, the last validation, and where the weights are."""

    steps: int
    train_loss: float
    valid: EvalResult | None
    weights: Path


def train(
    experiment: Experiment,
    folder: str | Path,
    *,
    resume: bool = False,
    device: str | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
) -> Result:
    """Train to the end, writing everything to `folder`. With resume=True go on where an earlier call stopped.

    data.folder must be prepared (see skipless.data.prepare). Ctrl-C saves a checkpoint first.
    """
    with join_world(device) as world, RunFolder.open(folder, experiment, resume=resume) as run:
        session = open_session(experiment, world, run, quiet=quiet or not world.main)
        if tensorboard and world.main:
            session.board = Board(run.path / "tensorboard")
        try:
            session.restore()
            while True:
                try:
                    _train_to_end(session)
                    break
                except Diverged as error:
                    _after_divergence(session, error)
            return _finish(session)
        finally:
            session.display.stop()
            if session.board is not None:
                session.board.close()


def _train_to_end(session: Session) -> None:
    config, progress, world = session.config, session.progress, session.world
    clip = session.experiment.optimizer.clip
    step_once = TrainStep(
        session.model, session.optimizer, config, world, clip=clip, packed=session.experiment.data.packed
    )
    step_once.rate_factor = progress.rate_factor
    if progress.step == 0:
        _probe(session)
    watch, pending, began = GradientWatch(), [], time.perf_counter()
    with session.loader.batches(progress.step, world.device) as batches, StopRequest() as stop:
        for step in range(progress.step, config.steps):
            pending.append(step_once(step, next(batches)))
            due = (step + 1) % config.log_every == 0 or step + 1 == config.steps or _saves(session, step + 1)
            if due or stop.asked:
                _flush(session, step, pending, watch, time.perf_counter() - began)
                pending, began = [], time.perf_counter()
            progress.step = step + 1
            _every(session)
            if stop.asked and progress.step < config.steps:
                session.checkpoint()
                raise KeyboardInterrupt(f"stopped after step {progress.step}; go on with --resume")


def _saves(session: Session, step: int) -> bool:
    every = session.config.checkpoint_every
    return bool(every) and step % every == 0


def _flush(session: Session, step: int, pending: list, watch: GradientWatch, seconds: float) -> None:
    """Bring the interval's losses and norms to the host at once, judge them, and log one line."""
    config, progress = session.config, session.progress
    losses, norms = torch.stack([torch.stack(pair) for pair in pending]).T.tolist()
    first = step + 1 - len(pending)
    check_finite(plain(session.model), first, losses, norms)
    for loss in losses:
        progress.smooth(loss, config.ema)
    for offset, norm in enumerate(norms):
        if warning := watch.see(first + offset, norm):
            logger.warning("%s", warning)
    rates = session.experiment.optimizer.rates
    rate = rates["value"] * progress.rate_factor * warmup_cosine(step + 1, config.steps, config.warmup)
    pace = len(pending) * config.batch_size * config.length / max(seconds, 1e-9)
    line = Line(step + 1, losses[-1], progress.ema or 0.0, rate, norms[-1], pace)
    session.display.show(line)
    session.record(line.as_record())


def _every(session: Session) -> None:
    """What is due after progress.step updates: probe, validation, then the checkpoint that remembers them."""
    config, progress = session.config, session.progress
    _probe(session)
    last = progress.step == config.steps
    if session.valid is not None and (last or progress.step % config.eval_every == 0):
        result = validate(session)
        progress.valid = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
        session.record({"step": progress.step, **{f"valid_{k}": v for k, v in progress.valid.items()}})
        session.display.say(f"step {progress.step}: validation loss {result.loss:.4f}, ppl {result.perplexity:.2f}")
    if last or _saves(session, progress.step):
        session.checkpoint()


def validate(session: Session) -> EvalResult:
    """Loss on the held-out windows, each process on its share."""
    assert session.valid is not None
    config, world = session.config, session.world
    most = max(config.eval_tokens // world.size, 1)
    model = session.model.eval()
    try:
        part = evaluate_loss(model, session.valid, max_tokens=most, device=world.device, precision=config.precision)
    finally:
        model.train()
    sums = torch.tensor([part.loss * part.tokens, part.tokens, part.bytes or 0], dtype=torch.float64)
    nats, tokens, size = (world.mean(sums.to(world.device)) * world.size).tolist()
    return EvalResult.of(nats, int(tokens), int(size) or None)


def _probe(session: Session) -> None:
    """If it is due, measure the kernels of the run's first sequence, save them and log their summary."""
    step = session.progress.step
    if step not in session.config.probe_at:
        return
    if session.world.size > 1:
        logger.warning("step %d: kernels are probed in runs of one process only", step)
        return
    tokens = session.loader.batch(0).inputs.to(session.world.device)
    probe = measure(plain(session.model), tokens, step)
    probe.save(session.run.path / "probes")
    session.record({"step": step, **{f"probe_{name}": value for name, value in probe.summary().items()}})
    if warning := diagonal_warning(step, probe.summary()):
        logger.warning("%s", warning)


def _after_divergence(session: Session, error: Diverged) -> None:
    """Stop with the last good checkpoint named, or go back to it with half the rate."""
    if session.config.on_divergence == "stop":
        saved = sorted(path.name for path in session.run.checkpoints.glob("step-*"))
        where = f"The last good checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."
        raise Diverged(error.step, f"{error} {where}")
    factor = session.progress.rate_factor / 2
    if factor < 2.0**-6:
        raise error
    fresh = open_session(session.experiment, session.world, session.run, session.display.quiet)
    session.model, session.optimizer = fresh.model, fresh.optimizer
    session.restore()
    session.progress.rate_factor = factor
    logger.warning("%s Goes back to step %d with %g of the rate.", error, session.progress.step, factor)


def _finish(session: Session) -> Result:
    """Write the weights and the tokenizer beside them, and mark the run as finished."""
    run, progress = session.run, session.progress
    path = run.path / WEIGHTS
    save_weights(session.model, path)
    if session.world.main:
        tokenizer = Path(session.experiment.data.folder or "") / MODEL_FILE
        if tokenizer.is_file():
            shutil.copyfile(tokenizer, run.path / MODEL_FILE)
    valid = progress.valid
    run.finish(steps=progress.step, train_loss=progress.ema, valid=valid, weights=str(path.relative_to(run.path)))
    result = EvalResult(valid["loss"], valid["perplexity"], valid["bits_per_byte"], 0, None) if valid else None
    return Result(progress.step, progress.ema or float("nan"), result, path)


def read_result(folder: str | Path) -> dict:
    """What a finished run wrote of itself."""
    path = Path(folder) / "finished.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a finished run (no finished.json); go on with --resume")
    return json.loads(path.read_text())
