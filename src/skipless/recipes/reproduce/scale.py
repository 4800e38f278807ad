"""Three sizes of the same experiments: seconds on a CPU, half a minute on a GPU, and the paper's own."""

import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal

from skipless.model.config import ModelConfig
from skipless.train.config import TrainConfig

PAPER_WIDTH = 1024


@dataclass(frozen=True)
class Scale:
    """What all arms share at one size. width is that of networks which are 1024 wide in the paper; 0: its own sizes.

    Depth is the paper's at every size: it is what the paper is about. rates and seeds are the defaults of the command;
    longest is the largest multiple of the usual steps that is run. judged: whether bands are meant for this size.
    """

    name: Literal["tiny", "small", "paper"]
    steps: int = 0
    width: int = 0
    head_width: int = 0
    length: int = 0
    batch_size: int = 0
    embedding_rate: float = 1e-3
    rates: int = 3
    seeds: int = 2
    longest: float = math.inf
    judged: bool = True

    def sizes(self, model: ModelConfig) -> dict[str, Any]:
        """Changes to a preset that bring it to this size."""
        if not self.width:
            return {}
        width = self.width * model.width // PAPER_WIDTH
        return {"width": width, "heads": max(width // self.head_width, 1), "length": self.length}

    def embedding(self, corpus: str) -> float:
        """The embedding's rate, one for all networks: App. H's, or the one of this size."""
        return self.embedding_rate if self.width else 5e-4 if corpus == "c4" else 2e-4

    def schedule(self, corpus: str, seed: int = 0, multiple: float = 1.0) -> TrainConfig:
        """The training of an arm, `multiple` times as long as usual. Warm-up is a tenth, or App. H's 4,000 steps.

        A short run keeps no checkpoints: its log is what is wanted of it. Stopped early, it saves one all the same.
        """
        if not self.width:
            steps, batch_size, length = (50_000, 8, 2048) if corpus == "c4" else (100_000, 16, 512)
            return TrainConfig(round(multiple * steps), batch_size, length, seed=seed, log_every=100, eval_every=5_000)
        steps, small = round(multiple * self.steps), self.name == "small"
        return TrainConfig(
            steps=steps,
            batch_size=self.batch_size,
            length=self.length,
            warmup=max(steps // 10, 1),
            seed=seed,
            precision="bf16" if small else "fp32",
            compile=small,
            impl="auto" if small else "sdpa",
            ema=0.01 if small else 0.5,
            log_every=25 if small else 1,
            eval_every=steps,
            eval_tokens=131_072 if small else 32,
            checkpoint_every=self.steps if small and multiple >= 2.0 else 0,
            keep=1,
        )


SCALES = {
    scale.name: scale
    for scale in (
        Scale("tiny", 3, 16, 8, 16, 2, rates=1, seeds=1, longest=2.0, judged=False),
        Scale("small", 1500, 256, 64, 256, 32, longest=5.0),
        Scale("paper", rates=5, seeds=3),
    )
}


def scale_named(name: str) -> Scale:
    """The scale of that name."""
    if name not in SCALES:
        near = difflib.get_close_matches(name, SCALES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SCALES)}"
        raise ValueError(f"--scale is {name!r}; {hint}")
    return SCALES[name]
