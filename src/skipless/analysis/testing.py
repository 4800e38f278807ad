"""For a project's own tests: a network whose signal dies fails with the block's name and what to change."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from skipless.analysis.inspect import inspect
from skipless.analysis.inspection import Inspection
from skipless.analysis.request import Batch
from skipless.theory.certificate import Band


def assert_signal_preserved(
    model: nn.Module,
    batch: Batch,
    *,
    blocks: Sequence[str] | str | None = None,
    labels: Tensor | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    allow_drift: bool = True,
    band: Band | None = None,
) -> Inspection:
    """Raise AssertionError unless the signal survives every block; return the inspection. Arguments as of inspect.

    allow_drift=False also refuses squared norms outside 1/4 … 4 of the input's, in networks without norms.
    """
    found = inspect(model, batch, blocks=blocks, labels=labels, loss=loss, keep_kernels=False, band=band)
    kind = found.verdict.kind
    if kind == "preserved" or (kind == "drift" and allow_drift):
        return found
    raise AssertionError(f"{found.model}: {found.verdict.text} {found.advice}\n{_around(found)}")


def _around(found: Inspection) -> str:
    """The numbers of the blocks next to the verdict's."""
    at = found.verdict.block or 0
    near = [each for each in found.blocks if abs(each.block - at) <= 2]
    lines = ["block  norm²     cosine   gradient²"]
    for each in near:
        gain = "-" if each.gradient_mean is None else f"{each.gradient_mean:.3g}"
        lines.append(f"{each.block:>5}  {each.norm_mean:<8.3g}  {each.cosine_mean:<7.4f}  {gain}")
    return "\n".join(lines)
