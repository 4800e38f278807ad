"""The training step as one CUDA graph: the host starts one thing a step instead of thousands of GPU kernels."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from skipless.data.image_loader import AnyBatch
from skipless.model.transformer import Transformer
from skipless.ops.cuda_graph import CudaRecorder, Replay
from skipless.training.optim.build import Composite

if TYPE_CHECKING:
    from skipless.training.trainer import TrainStep

# Compiling takes the first; torch asks for a few before capture, in which libraries set themselves up.
_WARM_UP = 3


class GraphedStep:
    """A TrainStep whose updates are replayed from a graph: every step from the first, with the same result.

    Only `TrainStep.update` is in the graph. Setting the rates, refreshing the half-precision copies and what the
    optimiser does between updates stay outside.
    The first call runs the update a few times and puts back what it changed, then captures it. From then on a call
    copies its batch into the graph's tensors, fills the rates and replays: nothing waits for the device. It captures
    anew for a batch of another shape, and after the optimiser has loaded a state, which replaces its tensors. A first
    step that is unlike the others (SOAP's) runs as it is.

    The optimiser's rates must be tensors: build_optimizer(…, capturable=True). recorder stands in for CUDA in tests.
    """

    def __init__(self, step: "TrainStep", recorder: CudaRecorder | None = None):
        self._step, self._recorder = step, recorder or CudaRecorder()
        self._replay: Replay | None = None
        self._inputs: AnyBatch | None = None
        self._rates: list[Tensor] = []
        self._read: object = None
        step.use_half_weights()
        for group in step.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                raise ValueError(
                    f"the rate of group {group['name']!r} is the number {group['lr']}, which a graph would repeat for "
                    "ever; use build_optimizer(…, capturable=True)"
                )

    def __call__(self, step: int, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Update the parameters by the batch of `step`; the tensors returned are the caller's own."""
        if isinstance(optimizer := self._step.optimizer, Composite) and not optimizer.begun:
            return self._step(step, batch)
        if self._stale(batch):
            self._step.set_rates(step)
            self._capture(batch)
        loss, norm = self._step(step, batch, update=self._replayed)
        return loss.clone(), norm.clone()

    def _replayed(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        assert self._inputs is not None
        assert self._replay is not None
        for own, new in zip(self._inputs.tensors, batch.tensors, strict=True):
            own.copy_(new, non_blocking=True)
        loss, norm = self._replay()
        return loss, norm

    def _stale(self, batch: AnyBatch) -> bool:
        if self._inputs is None:
            return True
        rates = [group["lr"] for group in self._step.optimizer.param_groups]
        same_rates = all(a is b for a, b in zip(rates, self._rates, strict=True))
        return not same_rates or [t.shape for t in batch.tensors] != [t.shape for t in self._inputs.tensors]

    def _capture(self, batch: AnyBatch) -> None:
        step, self._replay, self._inputs = self._step, None, None
        inputs = batch.map(torch.clone)
        with unchanged(step.model, step.optimizer):
            for _ in range(_WARM_UP):
                self._recorder.warm_up(lambda: step.update(inputs))
        self._rates = [group["lr"] for group in step.optimizer.param_groups]
        if isinstance(model := step.model, Transformer):  # which may replace what the graph reads
            length = inputs.inputs.shape[1] if model.config.images is None else model.config.length
            self._read = model.bias_vectors(length, model.embedding.weight)
        gc.collect()  # what the warm-up left behind must not be freed while kernels are recorded
        try:
            self._replay = self._recorder.capture(lambda: step.update(inputs))
        except RuntimeError as error:
            raise RuntimeError(
                f"the training step could not be captured in a CUDA graph ({error}); use --set train.cuda_graph=off"
            ) from error
        self._inputs = inputs


@contextmanager
def unchanged(model: nn.Module, optimizer: Optimizer) -> Generator[None]:
    """Put back the parameters and the optimiser's state after what runs inside; a state that is new starts at zero.

    In place, so that a graph finds the tensors where they were. Until then their values lie in the host's memory.
    """
    parameters = list(model.parameters())
    values = [_on_host(p) for p in parameters]
    states = {p: {name: _on_host(value) for name, value in state.items()} for p, state in optimizer.state.items()}
    yield
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        for parameter, state in optimizer.state.items():
            kept = states.get(parameter, {})
            for name, value in state.items():
                value.copy_(kept[name]) if name in kept else value.zero_()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
