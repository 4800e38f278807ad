"""The training loop: from an Experiment and a folder to a trained network, through kills and resumptions."""

import json
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from skipless.data.tokenizer import MODEL_FILE
from skipless.train.checkpoint import discard_from, save_weights
from skipless.train.config import Experiment
from skipless.train.distributed import join_world, plain
from skipless.train.divergence import Diverged, GradientWatch, check_finite, diagonal_warning
from skipless.train.ending import Ending, TimeUp
from skipless.train.evaluate import EvalResult, evaluate_loss
from skipless.train.graph import GraphedStep
from skipless.train.interrupt import StopRequest
from skipless.train.log import Board, Line
from skipless.train.optim import warmup_cosine
from skipless.train.probe import measure
from skipless.train.run import RunFolder
from skipless.train.session import Session, build, open_session
from skipless.train.step import TrainStep

logger = logging.getLogger("skipless")
WEIGHTS = "model.safetensors"
_KINDS = 128  # of blocks that one process keeps compiled; torch's own limit of 8 sends later networks back to eager


@dataclass(frozen=True)
class Result:
    """How a run ended: the smoothed training loss, the last validation, where the weights are (None: not kept).

    step_seconds is the median pace of this call's logged intervals.
    """

    steps: int
    train_loss: float
    valid: EvalResult | None
    weights: Path | None
    step_seconds: float = float("nan")


def train(
    experiment: Experiment,
    folder: str | Path,
    *,
    resume: bool = False,
    device: str | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
    ending: Ending | None = None,
) -> Result:
    """Train to the end, writing everything to `folder`. With resume=True go on where an earlier call stopped.

    data.folder must be prepared (see skipless.data.prepare). Ctrl-C saves a checkpoint first. ending may set a time.
    """
    kept = torch._dynamo.config.patch(recompile_limit=_KINDS)
    with kept, join_world(device) as world, RunFolder.open(folder, experiment, resume=resume) as run:
        session = open_session(experiment, world, run, quiet=quiet or not world.main)
        session.ending = ending or session.ending
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
                except RuntimeError as error:
                    _explain(session, error)
                    raise
            return _finish(session)
        finally:
            session.display.stop()
            if session.board is not None:
                session.board.close()


def _explain(session: Session, error: RuntimeError) -> None:
    """Raise with a remedy if it is torch.compile that failed, such as for want of a C++ compiler."""
    if session.config.compile and type(error).__module__.startswith("torch._inductor"):
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network could not be compiled ({reason}); without it training is slower: --set train.compile=false"
        ) from error


def _train_to_end(session: Session) -> None:
    config, progress, world = session.config, session.progress, session.world
    clip = session.experiment.optimizer.clip
    step_once = TrainStep(
        session.model, session.optimizer, config, world, clip=clip, packed=session.experiment.data.packed
    )
    step_once.rate_factor = progress.rate_factor
    advance = GraphedStep(step_once) if session.graph else step_once
    if progress.step == 0:
        _probe(session)
    watch, pending, began = GradientWatch(), [], time.perf_counter()
    with session.loader.batches(progress.step, world.device) as batches, StopRequest() as stop:
        for step in range(progress.step, config.steps):
            pending.append(advance(step, next(batches)))
            due = session.logs(step + 1)
            stopping = _stops(session, stop, due)
            if due or stopping:
                session.gradient_scale = step_once.gradient_scale
                _flush(session, step, pending, watch, began)
            progress.step = step + 1
            _every(session)
            if due or stopping:
                pending, began = [], time.perf_counter()
            if stopping and progress.step < config.steps:
                session.checkpoint()
                world.wait()
                raise stopping(f"stopped after step {progress.step}; go on with --resume")


def _stops(session: Session, stop: StopRequest, due: bool) -> type[BaseException] | None:
    """With what the run ends after this step: Ctrl-C, its time, or (None) not at all.

    A signal reaches each process at another step. All stop after the same one, the next that is logged.
    """
    world = session.world
    if world.size > 1 and not due:
        return None
    if world.any(stop.asked):
        return KeyboardInterrupt
    return TimeUp if world.any(session.ending.due) else None


def _flush(session: Session, step: int, pending: list, watch: GradientWatch, began: float) -> None:
    """Bring the interval's losses and norms to the host at once, judge them, and log one line."""
    config, progress = session.config, session.progress
    losses, norms = torch.stack([torch.stack(pair) for pair in pending]).T.tolist()
    seconds = time.perf_counter() - began  # read here, where the device has done what was asked of it
    first = step + 2 - len(pending)  # counted from 1, as the log does
    check_finite(plain(session.model), first, losses, norms, session.gradient_scale)
    for loss in losses:
        progress.smooth(loss, config.ema)
    for offset, norm in enumerate(norms):
        if warning := watch.see(first + offset, norm):
            logger.warning("%s", warning)
    peak = session.experiment.optimizer.peak_rate
    rate = peak * progress.rate_factor * warmup_cosine(step + 1, config.steps, config.warmup)
    session.paces.append(seconds / len(pending))
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
    if (last and session.ending.weights) or session.saves(progress.step):
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
    """Stop with the last good checkpoint named, or go back to it with half the rate.

    Where that ends at the same step again the checkpoint is ruined already: it goes, and the one before it serves, or
    the start.
    """
    if session.config.precision == "fp16":
        error = Diverged(error.step, f"{error} float16 ends at 65504: train.precision=bf16 has a wider range.")
    if session.config.on_divergence == "stop":
        saved = sorted(path.name for path in session.run.checkpoints.glob("step-*"))
        where = f"The last good checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."
        raise Diverged(error.step, f"{error} {where}")
    factor = session.progress.rate_factor / 2
    if factor < 2.0**-6:
        raise error
    if session.diverged == (session.saved, error.step):
        discard_from(session.run.checkpoints, session.saved)
    session.diverged = (session.saved, error.step)
    session.model, session.optimizer = build(session.experiment, session.world)
    session.restore()
    session.progress.rate_factor = factor
    logger.warning("%s Goes back to step %d with %g of the rate.", error, session.progress.step, factor)


def _finish(session: Session) -> Result:
    """Write the weights, if they are to be kept, and the tokenizer beside them; mark the run as finished."""
    run, progress, kept = session.run, session.progress, session.ending.weights
    path = run.path / WEIGHTS if kept else None
    if path is not None:
        save_weights(session.model, path)
        tokenizer = Path(session.experiment.data.folder or "") / MODEL_FILE
        if session.world.main and tokenizer.is_file():
            shutil.copyfile(tokenizer, run.path / MODEL_FILE)
    valid = progress.valid
    run.finish(steps=progress.step, train_loss=progress.ema, valid=valid, weights=path and path.name)
    result = EvalResult(valid["loss"], valid["perplexity"], valid["bits_per_byte"], 0, None) if valid else None
    return Result(progress.step, progress.ema or float("nan"), result, path, median(session.paces or [float("nan")]))


def read_result(folder: str | Path) -> dict:
    """What a finished run wrote of itself."""
    path = Path(folder) / "finished.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a finished run (no finished.json); go on with --resume")
    return json.loads(path.read_text())
