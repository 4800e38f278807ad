"""An item: one experiment of the paper, its arms, and what was said beforehand to count as agreement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipless.recipes.reproduce.arm import Arm, Measure
from skipless.recipes.reproduce.scale import Scale

if TYPE_CHECKING:
    from skipless.recipes.reproduce.bands import Band


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or a new one of the same kind.

    quantities: what its tables show, losses or names of measures. measure: what the run at the best rate is asked for
    besides. ladder: lengths of training, as multiples, at which arms are tried until one reaches what `baseline`
    reaches in the usual one. keeps_weights: of longer runs and of those that are measured. kernels: no training, only
    theory.
    """

    name: str
    title: str
    reference: str
    arms: tuple[Arm, ...] = ()
    bands: "tuple[Band, ...]" = ()
    quantities: tuple[str, ...] = ("train_loss",)
    measure: Measure = ""
    ladder: tuple[float, ...] = ()
    baseline: str = ""
    note: str = ""
    keeps_weights: bool = False
    kernels: bool = False

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"item {self.name!r} has two arms {doubled[0]!r}; names must differ")

    def chosen(self, scale: Scale, names: tuple[str, ...] = ()) -> tuple[Arm, ...]:
        """The arms to run: core ones, all at the paper's size, or those named; "all" names every one."""
        if not names:
            return self.arms if scale.name == "paper" else tuple(arm for arm in self.arms if arm.core)
        return self.arms if "all" in names else tuple(arm for arm in self.arms if arm.name in names)

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)
