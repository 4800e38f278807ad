"""A small prepared corpus and a small experiment on it."""

import dataclasses
from pathlib import Path

import pytest

from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.model.presets import preset
from skipless.training.config import DataConfig, Experiment, OptimizerConfig, TrainConfig


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Bytes of this very test suite's sources: real text, on every machine, in a moment."""
    folder = tmp_path_factory.mktemp("data")
    sources = Path(__file__).parents[2] / "src" / "skipless" / "theory"
    text = folder / "text.txt"
    text.write_text("\n\n\n".join(path.read_text() for path in sorted(sources.glob("*.py"))))
    prepare(Preparation(str(text), tokenizer=Bytes(), valid_fraction=0.2), folder / "tokens", workers=1)
    return folder / "tokens"


@pytest.fixture
def experiment(prepared) -> Experiment:
    """Eight vanilla E-SPA blocks of width 32, for 24 steps on the CPU."""
    model = preset("wikitext103/e-spa", width=32, heads=4, depth=8, vocab_size=256, length=32)
    scheme = dataclasses.replace(model.scheme, repeat_rate=0.05)
    return Experiment(
        "test",
        model=model.replace(scheme=scheme),
        data=DataConfig(folder=str(prepared)),
        optimizer=OptimizerConfig(rate=3e-4, embedding_rate=1e-3),
        train=TrainConfig(
            steps=24,
            batch_size=4,
            length=32,
            warmup=4,
            precision="fp32",
            compile=False,
            log_every=5,
            eval_every=12,
            eval_tokens=512,
            checkpoint_every=6,
        ),
    )
