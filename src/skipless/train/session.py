"""What lives while a run trains: model, optimiser, data and progress, as one process holds them."""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute_backward

from skipless.data.loader import TokenLoader
from skipless.data.store import TokenStore
from skipless.model.transformer import Transformer
from skipless.ops.precision import HALF
from skipless.train.checkpoint import load_checkpoint, save_checkpoint
from skipless.train.config import Experiment, TrainConfig
from skipless.train.distributed import World, distribute
from skipless.train.ending import Ending
from skipless.train.graph import chosen, refusal
from skipless.train.log import Board, Display
from skipless.train.optim import build_optimizer, freeze
from skipless.train.run import RunFolder

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
    ending: Ending = field(default_factory=Ending)
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
