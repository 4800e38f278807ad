"""recipe("wikitext103/e-spa"): the paper's training of a preset, as an Experiment to change and run."""

import difflib

from skipless.model import presets
from skipless.train.config import DataConfig, Experiment, TrainConfig
from skipless.train.optim import OptimizerConfig

# Adam rates that were best on a coarse grid at 36 blocks × 512; the paper tunes its own per network and prints none.
VANILLA_RATE, SKIP_RATE = 3e-5, 5e-4


def names() -> list[str]:
    """All recipe names."""
    return presets.names()


def recipe(name: str) -> Experiment:
    """The Experiment of a preset under App. H: corpus, steps, batch, length, warm-up, Adam and its rates."""
    if name not in presets.PRESETS:
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.3)
        raise ValueError(f"there is no recipe {name!r}; nearest: {', '.join(near) or ', '.join(names())}")
    model = presets.preset(name)
    c4 = name.startswith("c4/")
    steps, batch, corpus = (50_000, 8, "c4") if c4 else (100_000, 16, "wikitext-103")
    rate = VANILLA_RATE if model.skipless else SKIP_RATE
    return Experiment(
        name=name.replace("/", "-"),
        model=model,
        data=DataConfig(corpus=corpus, vocab=model.vocab_size),
        optimizer=OptimizerConfig(rate=rate, embedding_rate=5e-4 if c4 else 2e-4),
        train=TrainConfig(steps=steps, batch_size=batch, length=model.length),
    )
