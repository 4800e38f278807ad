"""The demonstration's arms: equal where they must be, apart where they are meant to be."""

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skipless.cli.demo import DEMO, SCALE, counting, demo_runs, demo_scale, shown_blocks
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes
from skipless.paper.experiments import PaperTable, Scale, Setting
from skipless.paper.records import Text
from skipless.paper.runs import Run
from skipless.theory.schemes import ExponentialSPA, StandardAttention
from skipless.training.config import Experiment, OptimizerConfig

SMALL = replace(SCALE, width=16, head_width=8, length=16, batch_size=2, training={**SCALE.training, "eval_tokens": 100})
SHALLOW = replace(DEMO, arms=tuple(replace(arm, changes={**arm.changes, "depth": 6}) for arm in DEMO.arms))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two documents, "abab…" to train on and "aab…" to validate on."""
    home = tmp_path_factory.mktemp("text")
    (home / "train.txt").write_text("ab" * 400)
    (home / "valid.txt").write_text("aab" * 200)
    plan = Preparation(str(home / "train.txt"), tokenizer=Bytes(), valid=str(home / "valid.txt"))
    prepare(plan, home / "data")
    return home / "data"


def runs(data: Path, scale: Scale = SCALE, seed: int = 0, table: PaperTable = DEMO) -> list[Run]:
    return demo_runs(Setting.of(scale, Text.read(data)), seed, table)


def test_arms_differ_in_network_and_rates_only(data: Path) -> None:
    first, *others = (run.experiment for run in runs(data, demo_scale(20), seed=3))
    assert first.train.steps == 20
    assert first.train.seed == 3
    assert first.train.warmup == 2
    for other in others:
        assert (other.train, other.data) == (first.train, first.data)
        rates = {name: getattr(first.optimizer, name) for name in ("rate", "role_rates")}
        assert dataclasses.replace(other.optimizer, **rates) == first.optimizer
        sizes = [dataclasses.asdict(e.model) for e in (first, other)]
        assert len({tuple(s[name] for name in ("depth", "width", "heads", "hidden", "vocab_size")) for s in sizes}) == 1


def test_arms_are_what_the_table_says(data: Path) -> None:
    found = runs(data, SMALL, table=SHALLOW)
    assert [run.arm for run in found] == ["pre-ln", "standard", "e-spa", "mirrored"]
    _, standard, e_spa, mirrored = models = [run.experiment.model for run in found]
    assert [model.skipless for model in models] == [False, True, True, True]
    assert [model.norm for model in models] == ["pre", "pre", "none", "none"]
    assert isinstance(standard.scheme, StandardAttention)
    assert e_spa.vanilla
    assert mirrored.vanilla
    assert (mirrored.mlp_init, mirrored.value_output) == ("mirrored", "identity")
    assert isinstance(mirrored.scheme, ExponentialSPA)
    assert mirrored.scheme.gamma_final == 0.05


def test_e_spa_takes_the_repeat_rate_of_the_text(data: Path) -> None:
    for scheme in (run.experiment.model.scheme for run in runs(data)[2:]):
        assert isinstance(scheme, ExponentialSPA)
        assert scheme.repeat_rate == round(TokenStore(data).repeat_rate or 0.0, 3) == pytest.approx(0.498, abs=0.003)


def test_experiments_survive_json(data: Path) -> None:
    for run in runs(data):
        assert Experiment.from_json(run.experiment.to_json()) == run.experiment


def test_the_demo_is_deep_narrow_and_short(data: Path) -> None:
    """36 × 96 on 64 bytes at a time; 100 steps of Muon, each arm at its own rate; probed, and resumable."""
    factors = {"query": 3.0, "key": 3.0, "up": 0.5, "down": 0.5}
    rates = [(4e-2, {}), (5e-4, {}), (2e-3, {}), (4e-3, factors)]
    for run, (rate, roles) in zip(runs(data), rates, strict=True):
        model, train, optimizer = run.experiment.model, run.experiment.train, run.experiment.optimizer
        assert (model.depth, model.width, model.heads, model.length) == (36, 96, 4, 64)
        assert (train.steps, train.batch_size, train.length, train.warmup) == (100, 16, 64, 10)
        assert (train.ema, train.eval_every, train.eval_tokens, train.on_divergence) == (0.1, 100, 16_384, "halve-lr")
        assert (train.probe_at, train.checkpoint_every, train.keep) == ((0, 99), 50, 1)
        assert optimizer == OptimizerConfig("muon", rate=rate, embedding_rate=5e-3, role_rates=roles)
        assert (run.experiment.name, run.weights) == (run.arm, True)


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_too_few_steps(data: Path, steps: int) -> None:
    with pytest.raises(ValueError, match=f"--steps is {steps}; the shortest schedule is .*: 2"):
        demo_scale(steps)
    assert runs(data, demo_scale(2))[0].experiment.train.warmup == 1


def test_counting_is_the_entropy_of_symbols(data: Path) -> None:
    found = counting(runs(data, SMALL)[0])
    # 400 a, 400 b and an end, each counted once more, and 253 symbols counted once
    shares = np.array([401, 401, 2, *[1] * 253]) / (801 + 256)
    assert found.train == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    # a and b cost the same, and no end is among the 112 validation tokens scored
    assert found.valid_bits == pytest.approx(-math.log2(401 / 1057), rel=1e-12)


def test_counting_scores_no_more_than_there_is(data: Path) -> None:
    everything = replace(SMALL, training={**SMALL.training, "eval_tokens": 10**6})
    assert counting(runs(data, everything)[0]).valid_bits == pytest.approx(-math.log2(401 / 1057), rel=1e-12)


@pytest.mark.parametrize(("depth", "blocks"), [(36, [0, 1, 6, 12, 36]), (6, [0, 1, 2, 6]), (1, [0, 1])])
def test_shown_blocks(depth: int, blocks: list[int]) -> None:
    assert shown_blocks(depth) == blocks
