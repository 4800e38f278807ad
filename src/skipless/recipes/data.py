"""Data for an experiment: a prepared folder is used as it is, a corpus by name is prepared first."""

import dataclasses
import logging
from pathlib import Path

from skipless.data.hub import DATASETS
from skipless.data.prepare import Preparation, prepare
from skipless.data.progress import Progress
from skipless.data.store import read_manifest
from skipless.data.training import Bytes, TrainUnigram
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.train.config import Experiment

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
