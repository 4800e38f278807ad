"""Training: the step and the loop."""

import json
import logging
import math
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute_backward

from skipless.data.loader import TokenLoader
from skipless.data.store import TokenStore
from skipless.data.tokenizer import MODEL_FILE
from skipless.model.transformer import Transformer
from skipless.ops.precision import HALF
from skipless.training.checkpoint import discard_from, load_checkpoint, save_checkpoint, save_weights
from skipless.training.config import Experiment, TrainConfig
from skipless.training.cuda_graph import GraphedStep, chosen, refusal
from skipless.training.distributed import World, distribute, join_world, plain
from skipless.training.divergence import Diverged, GradientWatch, check_finite, diagonal_warning, measure
from skipless.training.evaluate import EvalResult, evaluate_loss
from skipless.training.optim.build import build_optimizer, freeze, warmup_cosine
from skipless.training.run import Board, Display, Line, RunFolder
from skipless.training.step import TrainStep


@dataclass(frozen=True)
class RunLimits:
    """seconds: from now on, after which the run saves a checkpoint and OutOfTime is raised; resume=True goes on.

    weights=False: a run that reaches its end keeps its log and no weights, as one of many in a sweep.
    """

    seconds: float = math.inf
    weights: bool = True
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def due(self) -> bool:
        """Whether the seconds are over."""
        return time.monotonic() - self.began > self.seconds


class OutOfTime(Exception):
    """The run's seconds are over: it is saved, and goes on with resume=True."""


ECHO = 1.0  # seconds: torchrun hands a terminal's Ctrl-C on to processes that had it already
early = threading.Event()  # set by a process's own handler: a signal outside training, which the next run stops for


class StopRequest:
    """While it is entered, SIGINT and SIGTERM set `asked` instead of ending the process in the middle of an update.

    A second signal, more than ECHO seconds after the first, ends it as usual. Outside the main thread, where Python
    delivers no signals, it does nothing. Where `early` is set it has been asked from the start.
    """

    def __init__(self):
        self.asked = False
        self._first = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        if early.is_set():
            self.asked, self._first = True, time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # ty: ignore[invalid-argument-type]

    def _note(self, number: int, frame: object) -> None:
        if self.asked and time.monotonic() - self._first > ECHO:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._first = True, time.monotonic()


logger = logging.getLogger("skipless")


@dataclass
class Progress:
    """What a checkpoint keeps beside model and optimiser. rate_factor is halved on divergence, if asked for."""

    step: int = 0
    ema: float | None = None
    rate_factor: float = 1.0
    valid: dict | None = None

    def smooth(self, loss: float, factor: float) -> float:
        """The exponential moving average of the training loss, App. H's smoothing factor .01."""
        self.ema = loss if self.ema is None else (1.0 - factor) * self.ema + factor * loss
        return self.ema


@dataclass(eq=False)
class Session:
    """One process's part of a run: everything that lives while it trains.

    paces: seconds per step, by interval. gradient_scale: of the gradients that the last step has left behind.
    saved: step of the newest checkpoint, 0 for none. diverged: such a step and the one after it that diverged, the
    last time the run went back.
    """

    experiment: Experiment
    world: World
    run: RunFolder
    loader: TokenLoader
    valid: TokenLoader | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    display: Display
    board: Board | None = None
    progress: Progress = field(default_factory=Progress)
    graph: bool = False
    ending: RunLimits = field(default_factory=RunLimits)
    paces: list[float] = field(default_factory=list)
    gradient_scale: float = 1.0
    saved: int = 0
    diverged: tuple[int, int] | None = None

    @property
    def config(self) -> TrainConfig:
        """The run's schedule."""
        return self.experiment.train

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after so many updates."""
        every = self.config.checkpoint_every
        return bool(every) and step % every == 0

    def logs(self, step: int) -> bool:
        """Whether a line of the log is due after so many updates."""
        return step % self.config.log_every == 0 or step == self.config.steps or self.saves(step)

    def record(self, values: dict) -> None:
        """One line of metrics.jsonl, and of TensorBoard where it is on."""
        self.run.log(values)
        if self.board is not None:
            self.board.add(values)

    def checkpoint(self) -> None:
        """Save the state after progress.step updates."""
        self.run.sync()
        extra = {"ema": self.progress.ema, "rate_factor": self.progress.rate_factor, "valid": self.progress.valid}
        step, keep = self.progress.step, self.config.keep
        save_checkpoint(self.run.checkpoints, step, self.model, self.optimizer, extra, keep=keep)
        self.saved = step

    def restore(self) -> None:
        """Take up the newest good checkpoint, if there is one, and cut the log back to it."""
        found = load_checkpoint(self.run.checkpoints, self.model, self.optimizer)
        self.progress = Progress(found[0], **found[1]) if found else Progress()
        self.run.rewind(self.progress.step if found else None, self.logs)
        self.saved = self.progress.step
        if found:
            self.display.say(f"resumes after step {self.progress.step}")


def open_session(experiment: Experiment, world: World, run: RunFolder, quiet: bool) -> Session:
    """The model, its optimiser and its data on this process's device, ready for the first step."""
    config, data, graph = experiment.train, experiment.data, chosen(experiment, world)
    if data.folder is None:
        raise ValueError(f"data.folder is not set: prepare {data.corpus!r} first, or let `skipless train` do it")
    store = TokenStore(data.folder)
    if store.vocab_size > experiment.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={experiment.model.vocab_size} is smaller than the {store.vocab_size} tokens of "
            f"{data.folder}; use --set model.vocab_size={store.vocab_size}"
        )
    _check_length(experiment)
    shape = (config.length, config.batch_size, config.seed, world.rank, world.size)
    loader = TokenLoader(store, *shape, documents=data.packed)
    _check_share(config, world)
    valid = _valid_loader(experiment, world, store)
    model, optimizer = build(experiment, world)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    flops = flops_per_token(experiment.model.matrix_parameters, experiment) / world.size
    display = Display(experiment.name, config.steps, flops_per_token=flops, device=name, quiet=quiet)
    return Session(experiment, world, run, loader, valid, model, optimizer, display, graph=graph)


def build(experiment: Experiment, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as it starts and its optimiser, on this process's device."""
    config = experiment.train
    torch.manual_seed(config.seed)
    with world.device:
        model = Transformer(experiment.model, impl=config.impl)
    freeze(model, experiment.optimizer)
    if config.recompute:
        model.recompute = _recompute
    if config.compile:
        model.compile_blocks()
    wrapped = distribute(model, world, config.strategy, HALF.get(config.precision))
    # with or without a graph: rates of one kind, so that both compute the same
    return wrapped, build_optimizer(wrapped, experiment.optimizer, capturable=refusal(experiment, world) is None)


def _check_length(experiment: Experiment) -> None:
    """Refuse rows longer than attention is calibrated for, and say where network and rows are of different lengths."""
    rows, model = experiment.train.length, experiment.model
    if model.max_length is not None and rows > model.max_length:
        raise ValueError(
            f"train.length={rows} is more than model.length={model.length}, for which attention is calibrated; use "
            f"--set model.length={rows}"
        )
    if rows != model.length:
        logger.warning("train.length=%d and model.length=%d differ: is that meant?", rows, model.length)


def _check_share(config: TrainConfig, world: World) -> None:
    """Every process must cut its own rows into micro-batches, not only the batch as a whole."""
    rows, parts = config.batch_size // world.size, config.accumulate
    if rows % parts:
        fits = min((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: abs(n - parts))
        size = -(-rows // parts) * parts * world.size
        raise ValueError(
            f"train.accumulate={parts} does not divide the {rows} rows that each of {world.size} processes has of "
            f"train.batch_size={config.batch_size}; use --set train.accumulate={fits}, or --set train.batch_size={size}"
        )


def _recompute(block: nn.Module, *arguments) -> Tensor:
    # a network draws no random numbers, and their state cannot be read while a CUDA graph is captured
    return recompute_backward(block, *arguments, use_reentrant=False, preserve_rng_state=False)


def flops_per_token(matrix_parameters: int, experiment: Experiment) -> float:
    """6 per weight, and causal attention's 6·T·d per block: what training a token costs, forward and backward."""
    model = experiment.model
    return 6.0 * matrix_parameters + 6.0 * model.depth * model.width * experiment.train.length


def _valid_loader(experiment: Experiment, world: World, trained: TokenStore) -> TokenLoader | None:
    data, config = experiment.data, experiment.train
    if not config.eval_every:
        return None
    try:
        store = TokenStore(data.valid or trained.folder, "valid")
        if data.valid is not None:
            store.check_tokenizer(trained.tokenizer)
        return TokenLoader(store, config.length, config.batch_size, 0, world.rank, world.size, documents=data.packed)
    except ValueError as error:
        if data.valid is not None:
            raise ValueError(f"data.valid={data.valid} cannot serve for validation: {error}") from error
        logger.warning("no validation during training: %s", error)
        return None


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
    ending: RunLimits | None = None,
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
    return OutOfTime if world.any(session.ending.due) else None


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
