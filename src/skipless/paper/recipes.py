"""Recipes: a preset's network with its schedule and its data, as an Experiment."""

import dataclasses
import difflib
import logging
from pathlib import Path

from skipless.console import Progress
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import read_manifest
from skipless.data.text import DATASETS
from skipless.data.tokenizer import Bytes, TrainUnigram
from skipless.model import presets
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.training.config import DataConfig, Experiment, OptimizerConfig, TrainConfig

logger = logging.getLogger("skipless")


def prepared(corpus: str, vocab: int, root: str | Path = "data") -> Path:
    """The folder under `root` of a corpus, by name or path, in so many pieces; up to 257 are bytes. Made if need be."""
    folder = Path(root) / f"{Path(corpus).name.split('.')[0]}-{'bytes' if vocab <= 257 else vocab}"
    if corpus in DATASETS:
        kind = "--bytes" if vocab <= 257 else f"--vocab {vocab}"
        raise ValueError(
            f"{corpus} comes from the network, which is used only where it is asked for: "
            f"`skipless prepare {corpus} --download {kind} --out {folder}`, then --data {folder}"
        )
    tokenizer = Bytes() if vocab <= 257 else TrainUnigram(vocab)
    prepare(Preparation(corpus, tokenizer=tokenizer), folder, progress=Progress())
    return folder


def with_data(experiment: Experiment, root: str | Path = "data") -> Experiment:
    """The experiment with data.folder set: if it was not, the corpus is prepared under `root` (nothing is downloaded).

    A vocabulary of at most 257 means bytes. Says so when the scheme's repeat rate is far from the data's.
    """
    data = experiment.data
    if data.valid is not None:
        read_manifest(Path(data.valid))  # before an hour of tokenising
    if data.folder is None:
        folder = prepared(data.corpus, data.vocab or experiment.model.vocab_size, root)
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(data, folder=str(folder)))
    measured = read_manifest(Path(experiment.data.folder or "")).splits["train"].repeat_rate
    scheme = experiment.model.scheme
    if isinstance(scheme, ExponentialSPA | UniformSPA) and measured:
        ratio = max(scheme.repeat_rate, 1e-4) / max(measured, 1e-4)
        if not 0.5 < ratio < 2.0:
            logger.warning(
                "the scheme assumes repeat_rate=%g and these tokens have %.3g; norms will drift at initialisation: "
                "--set model.scheme.repeat_rate=%.3g",
                scheme.repeat_rate,
                measured,
                measured,
            )
    return experiment


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
