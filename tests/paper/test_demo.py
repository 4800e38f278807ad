"""The demonstration's three arms: equal where they must be, apart where they are meant to be."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes
from skipless.paper.demo import DEMO, E_SPA, PRE_LN, STANDARD, Size, arms, counting, shown_blocks
from skipless.theory.schemes import ExponentialSPA, StandardAttention
from skipless.training.config import Experiment

SMALL = Size(depth=6, width=16, heads=2, length=16, batch_size=2, eval_tokens=100)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two documents, "abab…" to train on and "aab…" to validate on."""
    home = tmp_path_factory.mktemp("text")
    (home / "train.txt").write_text("ab" * 400)
    (home / "valid.txt").write_text("aab" * 200)
    plan = Preparation(str(home / "train.txt"), tokenizer=Bytes(), valid=str(home / "valid.txt"))
    prepare(plan, home / "data")
    return home / "data"


def test_arms_differ_in_network_and_rate_only(data: Path) -> None:
    first, *others = (arm.experiment for arm in arms(data, 20, seed=3))
    assert first.train.steps == 20
    assert first.train.seed == 3
    assert first.train.warmup == 2
    for other in others:
        assert (other.train, other.data) == (first.train, first.data)
        assert dataclasses.replace(other.optimizer, rate=first.optimizer.rate) == first.optimizer
        sizes = [dataclasses.asdict(e.model) for e in (first, other)]
        assert len({tuple(s[name] for name in ("depth", "width", "heads", "hidden", "vocab_size")) for s in sizes}) == 1


def test_arms_are_what_the_table_says(data: Path) -> None:
    pre_ln, standard, e_spa = arms(data, size=SMALL)
    assert [arm.name for arm in (pre_ln, standard, e_spa)] == [PRE_LN, STANDARD, E_SPA]
    assert [arm.skips for arm in (pre_ln, standard, e_spa)] == ["yes", "none", "none"]
    assert [arm.norms for arm in (pre_ln, standard, e_spa)] == ["RMSNorm", "RMSNorm", "none"]
    assert isinstance(standard.experiment.model.scheme, StandardAttention)
    assert e_spa.experiment.model.vanilla


def test_e_spa_takes_the_repeat_rate_of_the_text(data: Path) -> None:
    scheme = arms(data)[2].experiment.model.scheme
    assert isinstance(scheme, ExponentialSPA)
    assert scheme.repeat_rate == round(TokenStore(data).repeat_rate or 0.0, 3) == pytest.approx(0.498, abs=0.003)


def test_experiments_survive_json(data: Path) -> None:
    for arm in arms(data):
        assert Experiment.from_json(arm.experiment.to_json()) == arm.experiment


def test_the_full_size_is_deep() -> None:
    assert DEMO.depth == 36


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_too_few_steps(data: Path, steps: int) -> None:
    with pytest.raises(ValueError, match=f"--steps is {steps}; the shortest schedule is .*: 2"):
        arms(data, steps)
    assert arms(data, 2)[0].experiment.train.warmup == 1


def test_counting_is_the_entropy_of_symbols(data: Path) -> None:
    found = counting(arms(data, size=SMALL)[0])
    # 400 a, 400 b and an end, each counted once more, and 253 symbols counted once
    shares = np.array([401, 401, 2, *[1] * 253]) / (801 + 256)
    assert found.train == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    # a and b cost the same, and no end is among the 112 validation tokens scored
    assert found.valid_bits == pytest.approx(-math.log2(401 / 1057), rel=1e-12)


def test_counting_scores_no_more_than_there_is(data: Path) -> None:
    everything = dataclasses.replace(SMALL, eval_tokens=10**6)
    assert counting(arms(data, size=everything)[0]).valid_bits == pytest.approx(-math.log2(401 / 1057), rel=1e-12)


@pytest.mark.parametrize(("depth", "blocks"), [(36, [0, 1, 6, 12, 36]), (6, [0, 1, 2, 6]), (1, [0, 1])])
def test_shown_blocks(depth: int, blocks: list[int]) -> None:
    assert shown_blocks(depth) == blocks
