"""How a call of train may end before or at the last step, and what it leaves behind."""

import math
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ending:
    """seconds: from now on, after which the run saves a checkpoint and TimeUp is raised; resume=True goes on.

    weights=False: a run that reaches its end keeps its log and no weights, as one of many in a sweep.
    """

    seconds: float = math.inf
    weights: bool = True
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def due(self) -> bool:
        """Whether the seconds are over."""
        return time.monotonic() - self.began > self.seconds


class TimeUp(Exception):
    """The run's seconds are over: it is saved, and goes on with resume=True."""
