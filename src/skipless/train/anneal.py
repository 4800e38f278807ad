"""The gradual route to a network without skips: α falls to 0 during training, and attention follows it."""

from dataclasses import dataclass, replace

from skipless.model import signal
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.nn.block import SubBlock
from skipless.theory.annealing import rotated_skip
from skipless.theory.propagation import Skip


@dataclass(frozen=True)
class SkipCourse:
    """α by step: `start` before step `begin`, none from step `end` on, between them as rotated_skip."""

    start: float
    begin: int
    end: int

    def __post_init__(self):
        if not 0 <= self.begin < self.end:
            raise ValueError(
                f"skips fall from step {self.begin} to step {self.end}; they need 0 ≤ begin < end, such as end="
                f"{max(self.begin, 0) + 1}"
            )
        rotated_skip(self.start, 0.0)

    def at(self, step: int) -> Skip:
        """The skip that training step `step` uses."""
        return rotated_skip(self.start, min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0))


class SkipAnneal:
    """Called with its number before each step: sets both skips of every block, and the attention that suits them.

        anneal = SkipAnneal(model, SkipCourse(0.98, begin=0, end=600))
        for step, batch in enumerate(batches):
            alpha = anneal(step)
            ...

    The model has normalised skips of weight course.start, trained or not. Every `every` steps, and at the course's end,
    γ_l, B and D are recomputed for the present α by App. F and the scheme's calibration, so that the kernels of a fresh
    network would meet their targets at every α; model.config says the same, and in the end is that of a network
    without skips. γ_L stays, so it must allow the first α: γ_L ≥ −½ ln(1−α^{2L}).

    Blocks run as they are, uncompiled: compiled code holds their skip weights as constants.
    """

    def __init__(self, model: Transformer, course: SkipCourse, every: int = 1):
        if every < 1:
            raise ValueError(f"every is {every}; it counts steps between two changes and must be at least 1")
        _check(model, course)
        self.model, self.course, self.every = model, course, every

    def __call__(self, step: int) -> float:
        """Make the network that step `step` trains; its α."""
        held = step if step >= self.course.end else step - step % self.every
        skip = self.course.at(held)
        if skip != self.model.config.attention_skip:
            set_skip(self.model, skip)
        return skip.shortcut


def set_skip(model: Transformer, skip: Skip) -> None:
    """Give every block this normalised skip around attention and MLP, and attention the shape that suits it."""
    config = model.config.replace(attention_skip=skip, mlp_skip=skip)
    shapes = signal.attention_shapes(config)
    for block, shape in zip(model.each_block(), shapes, strict=True):
        block.layers()[0].change_shape(shape)
        for part in (block.attention, block.mlp):
            if isinstance(part, SubBlock):
                part.set_skip(skip)
    model.config = config


def _check(model: Transformer, course: SkipCourse) -> None:
    config: ModelConfig = model.config
    expected = replace(course.at(0), trainable=False)
    for name in ("attention_skip", "mlp_skip"):
        skip = getattr(config, name)
        if (name == "attention_skip" or config.hidden) and abs(skip.shortcut - expected.shortcut) > 1e-9:
            raise ValueError(
                f"{name} is {skip.shortcut:g} and the course starts at {course.start:g}; they must agree: use "
                f"SkipCourse({skip.shortcut:g}, …), or Skip.normalised({course.start:g}) for both skips of the model"
            )
        if skip.trainable:
            raise ValueError(f"{name} is trainable, and annealing would fight its training; use trainable=False")
    if any(getattr(block, "_compiled_call_impl", None) is not None for block in model.each_block()):
        raise ValueError("the blocks are compiled, with their skip weights as constants; anneal an uncompiled model")
