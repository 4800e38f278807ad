"""One optimiser step: micro-batches, loss, gradient, clipping, update. No host synchronisation."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from skipless.data.loader import Batch
from skipless.ops.layout import Layout
from skipless.ops.precision import HALF, autocast, loss_scale
from skipless.training.config import TrainConfig
from skipless.training.distributed import World
from skipless.training.optim.adam import FusedAdam, clip_factor, clip_gradients, takes_twins
from skipless.training.optim.build import Composite, set_rates, warmup_cosine
from skipless.training.optim.half_weights import HalfWeights


def cross_entropy(model: nn.Module, batch: Batch, packed: bool) -> Tensor:
    """Mean next-token loss in nats: softmax cross entropy over the vocabulary, in float32. App. H."""
    layout = Layout.packed(batch.documents) if packed and batch.documents is not None else None
    return model(batch.inputs, targets=batch.targets, layout=layout)


class TrainStep:
    """Applies step after step to a model and its optimiser; returns loss and gradient norm as device tensors.

    gradient_scale: what the gradients that a step leaves behind are multiplied by.
    """

    def __init__(
        self, model: nn.Module, optimizer, config: TrainConfig, world: World, *, clip: float | None, packed: bool
    ):
        self.model, self.optimizer, self.config, self.world = model, optimizer, config, world
        self.clip, self.packed = clip, packed
        self.rate_factor, self.gradient_scale = 1.0, 1.0
        self.twins: HalfWeights | None = None

    def use_twins(self) -> None:
        """From now on compute with half-precision twins of the matrices, where that gives the numbers of autocast.

        For a step that is captured, since exchanging them is the host's work. Gradients of several micro-batches are
        summed in float32, without.
        """
        half = HALF.get(self.config.precision)
        alone = self.config.accumulate == 1 and self.world.size == 1
        if self.twins is None and half is not None and alone and takes_twins(self.optimizer):
            self.twins = HalfWeights(self.model, half)

    def __call__(self, step: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Update the parameters by the batch of `step`; rates follow from the step alone."""
        self.set_rates(step)
        self.refresh()
        result = self.update(batch)
        self.renew()
        return result

    def renew(self) -> None:
        """What the optimiser does between updates, out of a graph's reach: SOAP renews its bases."""
        if isinstance(self.optimizer, Composite):
            self.optimizer.renew()

    def refresh(self) -> None:
        """Take note of parameters that were changed from outside since the last step."""
        if self.twins is not None:
            self.twins.refresh()

    def set_rates(self, step: int) -> None:
        """The rates of `step`, counted from 0."""
        factor = self.rate_factor * warmup_cosine(step + 1, self.config.steps, self.config.warmup)
        set_rates(self.optimizer, factor)

    def update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One update at the rates that are set: all that a CUDA graph of the step holds."""
        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.world.device)
        parts = batch.tokens.shape[0] // config.accumulate
        self.gradient_scale = scale = loss_scale(config.precision, parts * batch.targets.shape[1])
        for index in range(config.accumulate):
            micro = batch.map(lambda tensor, start=index * parts: tensor[start : start + parts])
            last = index == config.accumulate - 1
            with self._sync(last), autocast(config.precision, self.world.device), self._halved():
                loss = cross_entropy(self.model, micro, self.packed) / config.accumulate
                (loss if scale == 1.0 else loss * scale).backward()
            total += loss.detach()
        return self.world.mean(total), self._descend()

    def _descend(self) -> Tensor:
        """Clip and step; the gradient's norm before clipping."""
        if self.twins is None:
            self._unscale()
            norm = clip_gradients(self.model.parameters(), self.clip)
            self.optimizer.step()
            return norm
        assert isinstance(self.optimizer, FusedAdam)
        norm, factor = clip_factor(self.model.parameters(), self.clip, self.gradient_scale)
        self.optimizer.step(scale=factor)
        return norm

    def _unscale(self) -> None:
        """Divide the parameters' gradients by their scale, in place."""
        if self.gradient_scale != 1.0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.gradient_scale)
            self.gradient_scale = 1.0

    def _halved(self):
        return nullcontext() if self.twins is None else self.twins.in_place()

    def _sync(self, last: bool):
        """DDP averages gradients once per step, after the last micro-batch."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()
