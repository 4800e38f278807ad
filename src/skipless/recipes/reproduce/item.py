"""An item: one experiment of the paper, its arms, and what was said beforehand to count as agreement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipless.recipes.reproduce import rates
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
    theory. embedding_rates: an odd number of neighbours on the ladder of rates, at which every arm's embedding is
    tried; one alone is not tuned, and none is the size's own rate.
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
    embedding_rates: tuple[float, ...] = ()

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"item {self.name!r} has two arms {doubled[0]!r}; names must differ")
        leaders = [arm.name for arm in self.arms if not arm.follows]
        for arm in self.arms:
            if arm.follows and arm.follows not in leaders:
                raise ValueError(f"arm {arm.name!r} follows {arm.follows!r}; it must be one of {', '.join(leaders)}")
        if (start := self.embedding_start) is not None:
            nearest = rates.grid(start, len(self.embedding_rates) | 1)
            if self.embedding_rates != nearest:
                raise ValueError(
                    f"embedding_rates of item {self.name!r} are {self.embedding_rates}; they must be an odd number of "
                    f"neighbours on the ladder, such as {nearest}"
                )

    @property
    def embedding_start(self) -> float | None:
        """The embedding's rate while the others are tuned: the middle of its rates; None is the size's own."""
        return self.embedding_rates[len(self.embedding_rates) // 2] if self.embedding_rates else None

    def chosen(self, scale: Scale, names: tuple[str, ...] = ()) -> tuple[Arm, ...]:
        """The arms to run: core ones, all at the paper's size, or those named; "all" names every one."""
        if not names:
            return self.arms if scale.name == "paper" else tuple(arm for arm in self.arms if arm.core)
        return self.arms if "all" in names else tuple(arm for arm in self.arms if arm.name in names)

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)
