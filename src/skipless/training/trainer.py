"""Training on a page: `train` is the loop and `TrainStep` the step, each read from top to bottom."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute_backward

from skipless.console import check_fits
from skipless.data.image_loader import AnyBatch
from skipless.data.loader import Prefetch
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.ops.modes import HALF, autocast, loss_scale
from skipless.training.accuracy import ImageResult
from skipless.training.checkpoint import checkpoints_until, discard_from, load_checkpoint, save_checkpoint, save_weights
from skipless.training.config import Experiment, TrainConfig
from skipless.training.cuda_graph import GraphedStep
from skipless.training.distributed import World, distribute, join_world, plain
from skipless.training.divergence import Diverged, GradientWatch, check_finite, check_state, diagonal_warning, measure
from skipless.training.evaluate import EvalResult
from skipless.training.feeds import open_feed
from skipless.training.optim.adam import FusedAdam, clip_factor, clip_gradients, supports_half_weights
from skipless.training.optim.build import Composite, build_optimizer, freeze, set_rates, warmup_cosine
from skipless.training.optim.half_weights import HalfWeights
from skipless.training.run import WEIGHTS, Board, Display, RunFolder, flops_per_token, least_bytes

_KINDS = 128  # of blocks that one process keeps compiled; torch's own limit of 8 sends later networks back to eager
_SMALLEST_FACTOR = 2.0**-6  # of the rate, where a run that diverges goes on with half of it
_ECHO = 1.0  # seconds: torchrun hands a terminal's Ctrl-C on to processes that had it already

logger = logging.getLogger("skipless")
early = threading.Event()  # a worker process sets it on a signal between runs: the next run then stops at once


@dataclass(frozen=True)
class Result:
    """How a run ended: the smoothed training loss, the last validation, where the weights are (None: not kept).

    step_seconds: per step, the median of this call's logged intervals.
    """

    steps: int
    train_loss: float
    valid: EvalResult | ImageResult | None
    weights: Path | None
    step_seconds: float = float("nan")


@dataclass(frozen=True)
class RunLimits:
    """seconds: from now on, after which the run saves a checkpoint and OutOfTime is raised; resume=True goes on.

    weights=False: a run that reaches its end keeps its log and no weights, as one of many in a sweep.
    validation=False: none, not even at the end, as where a step is timed.
    """

    seconds: float = math.inf
    weights: bool = True
    validation: bool = True
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def reached(self) -> bool:
        return time.monotonic() - self.began > self.seconds


class OutOfTime(Exception):
    """The run's seconds are over: it is saved, and goes on with resume=True."""


def train(
    experiment: Experiment,
    folder: str | Path,
    *,
    resume: bool = False,
    device: str | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
    limits: RunLimits | None = None,
) -> Result:
    """Train to the end, writing everything to `folder`. With resume=True go on where an earlier call stopped.

    data.folder must be prepared (see skipless.data.prepare). Ctrl-C and the end of limits.seconds save a checkpoint.
    """
    config, limits = experiment.train, limits or RunLimits()
    with (
        torch._dynamo.config.patch(recompile_limit=_KINDS),
        join_world(device) as world,
        RunFolder.open(folder, experiment, resume=resume) as run,
        Trainer(experiment, world, run, tensorboard=tensorboard, quiet=quiet) as trainer,
    ):
        trainer.start()
        with StopRequest() as stop, _compiler_explained(config, stop):
            while trainer.state.step < config.steps:
                # one update by one batch
                state = trainer.state  # another one after going back
                trainer.pending.append(trainer.advance(state.step, next(trainer.batches)))
                state.step += 1
                last, logs = state.step == config.steps, trainer.logs(state.step)
                stop_with = None if last else stop_reason(trainer, stop, limits, logs)

                # log, which is where divergence is noticed
                if logs or stop_with:
                    try:
                        trainer.log()
                    except Diverged as error:
                        trainer.go_back(error)
                        continue

                # evaluate
                if state.step in config.probe_at:
                    trainer.probe()
                if limits.validation and trainer.validates(state.step):
                    trainer.evaluate()

                # checkpoint, which remembers what was evaluated
                if stop_with or (last and limits.weights) or trainer.saves(state.step):
                    trainer.checkpoint()

                # stop
                if stop_with:
                    world.wait()
                    raise stop_with(f"stopped after step {state.step}; go on with --resume")

                # the next interval of the log begins
                if logs:
                    trainer.pending, trainer.began = [], time.perf_counter()
        return trainer.finish(weights=limits.weights)


class TrainStep:
    """One step of training, called with its number, from 0, and its batch. Nothing in it waits for the device.

    Returns the loss and the norm of the gradient before clipping, both on the device. rate_factor multiplies every
    rate. gradient_scale: the factor by which the gradients that remain after a step are too large, in float16.
    """

    def __init__(
        self, model: nn.Module, optimizer, config: TrainConfig, world: World, *, clip: float | None, packed: bool
    ):
        self.model, self.optimizer, self.config, self.world = model, optimizer, config, world
        self.clip, self.packed = clip, packed
        self.rate_factor, self.gradient_scale = 1.0, 1.0
        self.half: HalfWeights | None = None

    def __call__(
        self, step: int, batch: AnyBatch, update: Callable[[AnyBatch], tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Set the rates of `step`, update the parameters, then do what the optimiser does between updates.

        update: what runs instead of self.update, such as a CUDA graph of it.
        """
        self.set_rates(step)
        if self.half is not None:
            self.half.refresh()
        loss, norm = (update or self.update)(batch)
        if isinstance(self.optimizer, Composite):
            self.optimizer.renew()  # SOAP's bases
        return loss, norm

    def update(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Forward, loss, backward, clip, update, at the rates that are set: all that a CUDA graph of the step holds."""
        config, model, half = self.config, self.model, self.half
        rows = len(batch.targets) // config.accumulate
        scale = loss_scale(config.precision, batch.targets.numel() // config.accumulate)
        self.optimizer.zero_grad(set_to_none=True)

        # the gradient, summed over micro-batches
        total = torch.zeros((), device=self.world.device)
        for index in range(config.accumulate):
            micro = batch.map(lambda tensor, start=index * rows: tensor[start : start + rows])
            # DDP averages gradients over processes once, in the last backward pass
            waits = isinstance(model, DistributedDataParallel) and index < config.accumulate - 1
            with (
                model.no_sync() if waits else nullcontext(),
                autocast(config.precision, self.world.device),
                half.in_place() if half is not None else nullcontext(),
            ):
                loss = cross_entropy(model, micro, self.packed) / config.accumulate
                (loss if scale == 1.0 else loss * scale).backward()
            total += loss.detach()
        mean = self.world.mean(total)

        # clip and update
        if half is not None:  # in one pass over memory, by kernels that read gradients of half precision
            norm, factor = clip_factor(map(half.gradient_of, model.parameters()), self.clip, scale)
            self.optimizer.step(scale=factor)
            self.gradient_scale = scale
            return mean, norm
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1.0 / scale)
        norm = clip_gradients(model.parameters(), self.clip)
        self.optimizer.step()
        return mean, norm

    def set_rates(self, step: int) -> None:
        """The rates of `step`, counted from 0; they follow from the step alone."""
        factor = self.rate_factor * warmup_cosine(step + 1, self.config.steps, self.config.warmup)
        set_rates(self.optimizer, factor)

    def use_half_weights(self) -> None:
        """From now on compute with half-precision copies of the matrices, where that gives the numbers of autocast.

        For a step that is captured in a CUDA graph, since exchanging them is the host's work. Not with several
        micro-batches, whose gradients are summed in float32.
        """
        half = HALF.get(self.config.precision)
        alone = self.config.accumulate == 1 and self.world.size == 1
        if self.half is None and half is not None and alone and supports_half_weights(self.optimizer):
            assert isinstance(self.optimizer, FusedAdam)
            self.half = self.optimizer.half_weights = HalfWeights(self.model, half)


def cross_entropy(model: nn.Module, batch: AnyBatch, packed: bool) -> Tensor:
    """Mean loss in nats: softmax cross entropy of the next token, or of an image's class, in float32. App. H."""
    layout = Layout.packed(batch.documents) if packed and batch.documents is not None else None
    return model(batch.inputs, targets=batch.targets, layout=layout)


@dataclass
class RunState:
    """What a checkpoint keeps beside model and optimiser. rate_factor is halved on divergence, if asked for."""

    step: int = 0
    ema: float | None = None
    rate_factor: float = 1.0
    valid: dict | None = None


class Trainer:
    """One process's part of a run: model, optimiser, data, log, and how far the run has come.

    A context manager; `start` builds the network and takes up the newest checkpoint.

    pending: loss and norm of the steps since the last log line, on the device. began: when that interval did.
    step_seconds: mean of each interval. saved: step of the newest checkpoint, 0 for none. diverged: when the run last
    went back, the checkpoint's step and the one that diverged.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train_step: TrainStep
    advance: Callable[[int, AnyBatch], tuple[Tensor, Tensor]]  # the step, or a CUDA graph of it
    batches: Prefetch

    def __init__(
        self, experiment: Experiment, world: World, run: RunFolder, *, tensorboard: bool = False, quiet: bool = False
    ):
        config = experiment.train
        self.experiment, self.config, self.world, self.run = experiment, config, world, run
        self.graph = uses_graph(experiment, world)
        self.feed = open_feed(experiment, world)
        smaller = "lower train.batch_size, raise train.accumulate, or make the network smaller"
        check_fits(least_bytes(experiment, world.size, world.device.type), "this run", smaller, world.free_memory)
        self.board = Board(run.path / "tensorboard") if tensorboard and world.main else None
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
        flops = flops_per_token(experiment) / world.size
        patches = experiment.model.length if experiment.model.images is not None else 0
        shown = {"flops_per_token": flops, "device": name, "quiet": quiet or not world.main, "patches": patches}
        self.display = Display(experiment.name, config.steps, **shown)
        self.state, self.watch = RunState(), GradientWatch()
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.began = 0.0
        self.step_seconds: list[float] = []
        self.saved = 0
        self.diverged: tuple[int, int] | None = None
        self._open = ExitStack()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.display.stop()
        if self.board is not None:
            self.board.close()

    def start(self, rate_factor: float | None = None) -> None:
        """Build the network, take up the newest good checkpoint, if there is one, and cut the log back to it."""
        self._open.close()
        self.model, self.optimizer = build(self.experiment, self.world)
        found = load_checkpoint(self.run.checkpoints, self.model, self.optimizer)
        self.state = state = RunState(found[0], **found[1]) if found else RunState()
        self.run.rewind(state.step if found else None, self.logs)
        self.saved = state.step
        if found:
            self.display.say(f"resumes after step {state.step}")
        state.rate_factor = state.rate_factor if rate_factor is None else rate_factor
        clip, packed = self.experiment.optimizer.clip, self.experiment.data.packed
        self.train_step = TrainStep(self.model, self.optimizer, self.config, self.world, clip=clip, packed=packed)
        self.train_step.rate_factor = state.rate_factor
        self.advance = GraphedStep(self.train_step) if self.graph else self.train_step
        if state.step == 0 and 0 in self.config.probe_at:
            self.probe()
        self.watch, self.pending, self.began = GradientWatch(), [], time.perf_counter()
        self.batches = self._open.enter_context(self.feed.loader.batches(state.step, self.world.device))

    def validates(self, step: int) -> bool:
        """Whether the network is judged after so many updates: at the end, and every train.eval_every before it."""
        every, last = self.config.eval_every, step == self.config.steps
        return self.feed.valid is not None and (last or (bool(every) and step % every == 0))

    def saves(self, step: int) -> bool:
        every = self.config.checkpoint_every
        return bool(every) and step % every == 0

    def logs(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.config.steps or self.saves(step)

    def log(self) -> None:
        """Bring the losses and norms of the interval to the host at once, check them, and log one line."""
        config, state, pending = self.config, self.state, self.pending
        losses, norms = torch.stack([torch.stack(pair) for pair in pending]).T.tolist()
        seconds = time.perf_counter() - self.began  # read here, where the device has done what was asked of it
        first = state.step + 1 - len(pending)
        check_finite(plain(self.model), first, losses, norms, self.train_step.gradient_scale, self.train_step.half)
        check_state(self.model, self.optimizer, state.step, self.world.any)
        for loss in losses:  # App. H's exponential moving average
            state.ema = loss if state.ema is None else (1.0 - config.ema) * state.ema + config.ema * loss
        for step, norm in enumerate(norms, first):
            if warning := self.watch.see(step, norm):
                logger.warning("%s", warning)
        peak = self.experiment.optimizer.peak_rate
        rate = peak * state.rate_factor * warmup_cosine(state.step, config.steps, config.warmup)
        self.step_seconds.append(seconds / len(pending))
        # time is left out, so that equal runs have equal logs
        line = {"step": state.step, "loss": losses[-1], "ema": state.ema, "rate": rate, "gradient": norms[-1]}
        self.display.show(line, len(pending) * config.batch_size * config.length / max(seconds, 1e-9))
        self.record(line)

    def record(self, values: dict) -> None:
        """One line of metrics.jsonl, and of TensorBoard where it is on."""
        self.run.log(values)
        if self.board is not None:
            self.board.add(values)

    def evaluate(self) -> None:
        """Log the result on held-out data."""
        state, result = self.state, self.feed.evaluate(self.model)
        state.valid = result.numbers()
        self.record({"step": state.step, **{f"valid_{name}": value for name, value in state.valid.items()}})
        self.display.say(f"step {state.step}: {result.words()}")

    def probe(self) -> None:
        """Measure the kernels of the run's first sequence, save them and log their summary."""
        step = self.state.step
        if self.world.size > 1:
            logger.warning("step %d: kernels are probed in runs of one process only", step)
            return
        rows = self.feed.loader.batch(0).to(self.world.device).inputs
        probe = measure(plain(self.model), rows, step)
        probe.save(self.run.path / "probes")
        self.record({"step": step, **{f"probe_{name}": value for name, value in probe.summary().items()}})
        if warning := diagonal_warning(step, probe.summary()):
            logger.warning("%s", warning)

    def checkpoint(self) -> None:
        self.run.sync()
        extra = {"ema": self.state.ema, "rate_factor": self.state.rate_factor, "valid": self.state.valid}
        step, keep = self.state.step, self.config.keep
        save_checkpoint(self.run.checkpoints, step, self.model, self.optimizer, extra, keep=keep)
        self.saved = step

    def go_back(self, error: Diverged) -> None:
        """After divergence stop with the last good checkpoint named, or start from it with half the rate.

        Where that diverges at the same step again the checkpoint is ruined already: it is deleted, and the run starts
        from the one before it, or from the beginning.
        """
        if self.config.precision == "fp16":
            words = f"{error} float16 ends at 65504: train.precision=bf16 has a wider range."
            error = Diverged(error.step, words, error.good)
        if self.config.on_divergence == "stop":
            good = [path.name for path in checkpoints_until(self.run.checkpoints, error.good)]
            where = f"The last good checkpoint is {good[-1]}." if good else "There is no good checkpoint."
            raise Diverged(error.step, f"{error} {where}", error.good)
        factor = self.state.rate_factor / 2
        if factor < _SMALLEST_FACTOR:
            raise error
        if self.diverged == (self.saved, error.step):
            discard_from(self.run.checkpoints, self.saved)
        self.diverged = (self.saved, error.step)
        self.start(rate_factor=factor)
        logger.warning("%s Goes back to step %d with %g of the rate.", error, self.state.step, factor)

    def finish(self, weights: bool) -> Result:
        """Write the weights, if they are to be kept; mark the run as finished."""
        run, state, valid = self.run, self.state, self.state.valid
        path = run.path / WEIGHTS if weights else None
        if path is not None:
            save_weights(self.model, path)
        run.finish(steps=state.step, train_loss=state.ema, valid=valid, weights=path and path.name)
        result = self.feed.result.from_numbers(valid) if valid else None
        seconds = median(self.step_seconds or [float("nan")])
        return Result(state.step, state.ema or float("nan"), result, path, seconds)


def build(experiment: Experiment, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as it starts and its optimiser, on this process's device."""
    config = experiment.train
    torch.manual_seed(config.seed)
    with world.device:
        model = Transformer(experiment.model, impl=config.impl)
    freeze(model, experiment.optimizer)
    model.label_smoothing = config.label_smoothing
    if config.recompute:
        model.recompute = _recompute
    if config.compile:
        model.compile_blocks()
    wrapped = distribute(model, world, config.strategy, HALF.get(config.precision))
    # with or without a graph: rates of one kind, so that both compute the same
    return wrapped, build_optimizer(wrapped, experiment.optimizer, capturable=why_no_graph(experiment, world) is None)


def uses_graph(experiment: Experiment, world: World) -> bool:
    """Whether the run uses a graph, by train.cuda_graph: "auto" says why it does not, "on" refuses to run without."""
    choice, why = experiment.train.cuda_graph, why_no_graph(experiment, world)
    if choice == "on" and why is not None:
        raise ValueError(f"train.cuda_graph is 'on', but {why}; use --set train.cuda_graph=auto")
    if choice == "auto" and why is not None:
        logger.info("train.cuda_graph='auto' runs the step without a CUDA graph: %s", why)
    return choice != "off" and why is None


def why_no_graph(experiment: Experiment, world: World) -> str | None:
    """Why this run's step cannot be a CUDA graph, or None."""
    if world.device.type != "cuda":
        return f"the device is {world.device}, and CUDA graphs need an NVIDIA GPU"
    if world.size > 1:
        return f"the run has {world.size} processes, whose communication is not captured"
    if experiment.model.position == "relative":
        return "relative positions read their furthest distance from the device"
    return None


def _recompute(block: nn.Module, *arguments) -> Tensor:
    # a network draws no random numbers, and their state cannot be read while a CUDA graph is captured
    return recompute_backward(block, *arguments, use_reentrant=False, preserve_rng_state=False)


class StopRequest:
    """While it is entered, SIGINT and SIGTERM set `asked` instead of ending the process in the middle of an update.

    A second signal, more than _ECHO seconds after the first, ends it as usual. Outside the main thread, where Python
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
        if self.asked and time.monotonic() - self._first > _ECHO:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._first = True, time.monotonic()


def stop_reason(trainer: Trainer, stop: StopRequest, limits: RunLimits, logs: bool) -> type[BaseException] | None:
    """The exception that ends the run after this step, for Ctrl-C or the end of its time; None to go on.

    A signal reaches each process at another step. All stop after the same one, the next that is logged.
    """
    world = trainer.world
    if world.size > 1 and not logs:
        return None
    if world.any(stop.asked):
        return KeyboardInterrupt
    return OutOfTime if world.any(limits.reached) else None


@contextmanager
def _compiler_explained(config: TrainConfig, stop: StopRequest) -> Generator[None]:
    """Make an error of torch.compile, as where no C++ compiler is installed, say what to do.

    Ctrl-C in a terminal also ends the C++ compiler. That is the end of the run, and no error of the network.
    """
    try:
        yield
    except RuntimeError as error:
        if not (config.compile and type(error).__module__.startswith("torch._inductor")):
            raise
        if stop.asked:
            raise KeyboardInterrupt("stopped while the network was being compiled; go on with --resume") from error
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network could not be compiled ({reason}); without it training is slower: --set train.compile=false"
        ) from error
