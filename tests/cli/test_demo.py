"""`skipless demo`: its arms, equal where they must be, and all of it on a network small enough for seconds."""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skipless.cli import demo as cli_demo
from skipless.cli.demo import DEMO, SCALE, Counting, counting, demo_runs, demo_scale, shown_blocks
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes
from skipless.paper import workers
from skipless.paper.experiments import Scale, Setting
from skipless.paper.records import Text
from skipless.paper.runs import Run
from skipless.theory.schemes import ExponentialSPA, StandardAttention
from skipless.training import trainer
from skipless.training.config import Experiment, OptimizerConfig
from skipless.training.run import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = replace(SCALE, width=16, head_width=8, length=16, batch_size=2, training={**SCALE.training, "eval_tokens": 64})
SHALLOW = replace(DEMO, arms=tuple(replace(arm, changes={**arm.changes, "depth": 6}) for arm in DEMO.arms))
ARMS = ("pre-ln", "standard", "e-spa", "mirrored")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Preparation:
    home = tmp_path_factory.mktemp("text")
    for name, numbers in {"train.txt": range(300), "valid.txt": range(300, 350)}.items():
        (home / name).write_text("\n\n".join(f"def f{n}(x):\n    return x + {n}" for n in numbers))
    return Preparation(str(home / "train.txt"), tokenizer=Bytes(), valid=str(home / "valid.txt"))


@pytest.fixture
def demo(skipless, monkeypatch, text: Preparation) -> Callable[..., tuple[str, str]]:
    """The command, on a small text and with a small network."""
    monkeypatch.setattr(cli_demo, "DEMO", SHALLOW)
    monkeypatch.setattr(cli_demo, "SCALE", TINY)
    monkeypatch.setattr(cli_demo, "TEXT", text)
    monkeypatch.setattr(cli_demo, "SAMPLE_TOKENS", 20)
    return partial(skipless, "demo", "--device", "cpu")


def losses(arm: str, out: str = "skipless-demo") -> list[float]:
    return [record["loss"] for record in read_metrics(Path(out) / "runs" / arm) if "loss" in record]


def test_end_to_end_and_again(demo, monkeypatch) -> None:
    out, err = demo("--steps", "6")
    home = Path("skipless-demo")
    lines = out.splitlines()
    assert lines[1].split()[:3] == ["network", "skips", "norms"]
    assert [line.split()[0] for line in lines[2:7]] == ["Pre-LN", "standard", "E-SPA", "E-SPA", "counting"]
    assert "E-SPA mirrored writes, after 6 steps:" in lines
    assert "    def " in out
    assert lines[-1].count("counting symbols.") == 4
    results = json.loads((home / "results.json").read_text())
    for arm, row, line in zip(ARMS, results["networks"], lines[2:6], strict=True):
        assert row["name"] == arm
        np.testing.assert_allclose(row["losses"], losses(arm), atol=1e-4)
        assert row["training_loss"] == pytest.approx(losses(arm)[-1])
        assert f" {row['training_loss']:.2f} " in line
        assert f" {row['valid_bits_per_byte']:.2f} " in line
    written = [Path(line.removeprefix("wrote ")) for line in lines if line.startswith("wrote ")]
    assert [path.name for path in written] == ["demo.png", "results.json", "sample.txt", "model.safetensors"]
    assert all(path.is_file() for path in written)
    assert "4/4 E-SPA mirrored (skips: none, norms: none): 6 steps" in err

    monkeypatch.setattr(workers, "train", lambda *_, **__: pytest.fail("it trains again"))
    (home / "demo.png").unlink()
    again, err = demo("--steps", "6")
    assert again == out
    assert err.count("trained already") == 4
    assert (home / "demo.png").is_file()

    home.rename("elsewhere")
    moved, _ = demo("--steps", "6", "--out", "elsewhere")
    assert moved == out.replace("skipless-demo", "elsewhere")


def test_an_interruption_resumes_to_the_same_numbers(demo, monkeypatch) -> None:
    demo("--steps", "6", "--out", "whole")
    inner = trainer.cross_entropy
    calls: list[int] = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 9:  # the third step of the second network
            os.kill(os.getpid(), signal.SIGINT)
        return inner(*args, **kwargs)

    monkeypatch.setattr(trainer, "cross_entropy", interrupted)
    _, err = demo("--steps", "6", code=130)
    assert err.splitlines()[-1].endswith(
        "stopped while training standard attention; the same command goes on from there"
    )
    assert len(losses("standard")) == 3
    out, err = demo("--steps", "6")
    assert err.count("trained already") == 1
    assert [losses(arm) for arm in ARMS] == [losses(arm, "whole") for arm in ARMS]
    assert "counting symbols" in out


def test_numbers_below_the_normal_ones_are_zero_while_it_trains_and_only_then(demo, monkeypatch) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot")
    inner, seen = trainer.cross_entropy, []

    def small() -> float:
        return float(torch.full((1,), 1e-39) * 1.0)

    def watched(*args, **kwargs):
        seen.append(small())
        return inner(*args, **kwargs)

    assert small() > 0.0
    monkeypatch.setattr(trainer, "cross_entropy", watched)
    demo("--steps", "2")
    assert seen == [0.0] * len(seen)
    assert len(seen) >= 8
    assert small() > 0.0


def test_other_settings_are_refused_and_fresh_starts_over(demo) -> None:
    demo("--steps", "3")
    before = losses("e-spa")
    _, err = demo("--steps", "4", code=2)
    assert "(--steps 3 there, 4 here)" in err
    assert err.rstrip().endswith("start over with --fresh")
    assert losses("e-spa") == before
    demo("--steps", "4", "--seed", "1", "--fresh")
    assert len(losses("e-spa")) == 4


def test_a_finished_demo_of_three_networks_is_known_as_one(demo) -> None:
    """Earlier versions had no more."""
    demo("--steps", "2")
    shutil.rmtree("skipless-demo/runs/mirrored")
    _, err = demo("--steps", "2")
    assert err.count("trained already") == 3


def test_bad_requests_end_in_one_line(demo) -> None:
    Path("file").write_text("")
    assert "file is a file: name a folder" in demo("--out", "file", code=2)[1]
    assert "--steps is 1; the shortest schedule" in demo("--steps", "1", code=2)[1]
    assert not Path("skipless-demo").exists()


def test_a_bad_request_to_start_over_deletes_nothing(demo) -> None:
    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path("skipless-demo").rglob("*")}

    demo("--steps", "2")
    before = there()
    for words, message in (
        (("--steps", "0"), "--steps is 0; the shortest schedule"),
        (("--device", "cuda:97"), "'cuda:97', but torch sees"),
        (("--device", "foo"), "'foo', which torch does not know; use cpu, cuda"),
    ):
        assert message in demo("--fresh", *words, code=2)[1]
        assert there() == before


def test_without_matplotlib_all_but_the_picture_is_there(demo, monkeypatch) -> None:
    for name in ("skipless.figures.style", "skipless.figures.training", "skipless.figures.kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, err = demo("--steps", "2")
    assert "pip install 'skipless[plot]'" in err
    assert "counting symbols" in out
    assert not Path("skipless-demo/demo.png").exists()


@pytest.mark.parametrize(
    ("losses", "title"),
    [
        ((2.1, 3.2, 2.7, 2.0), "standard attention learns nothing, E-SPA learns, mirrored E-SPA more than Pre-LN"),
        ((2.0, 3.2, 2.7, 2.1), "standard attention learns nothing, E-SPA learns"),
        ((2.1, 3.2, 3.2, 2.0), ""),
        ((2.1, 3.0, 2.7, 2.0), ""),
    ],
)
def test_the_title_claims_what_the_losses_show(losses, title) -> None:
    experiment = SimpleNamespace(model=SimpleNamespace(depth=36))
    rows = [
        SimpleNamespace(run=SimpleNamespace(arm=arm, experiment=experiment), record=SimpleNamespace(train_loss=loss))
        for arm, loss in zip(ARMS, losses, strict=True)
    ]
    found = cli_demo.title(rows, Counting(3.24, 4.5))
    assert found == (f"36 blocks without skips: {title}" if title else "36 blocks, with and without skips")


@pytest.mark.slow
def test_the_full_networks_take_a_step(demo, monkeypatch) -> None:
    monkeypatch.setattr(cli_demo, "DEMO", DEMO)
    monkeypatch.setattr(cli_demo, "SCALE", SCALE)
    out, _ = demo("--steps", "2")
    verdicts = [line.rsplit("  ", 1)[1] for line in out.splitlines()[2:6]]
    assert verdicts[0] == verdicts[2] == verdicts[3] == "preserved"
    assert verdicts[1].startswith("collapse at block ")


SMALL = replace(SCALE, width=16, head_width=8, length=16, batch_size=2, training={**SCALE.training, "eval_tokens": 100})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two documents, "abab…" to train on and "aab…" to validate on."""
    home = tmp_path_factory.mktemp("text")
    (home / "train.txt").write_text("ab" * 400)
    (home / "valid.txt").write_text("aab" * 200)
    plan = Preparation(str(home / "train.txt"), tokenizer=Bytes(), valid=str(home / "valid.txt"))
    prepare(plan, home / "data")
    return home / "data"


def runs(data: Path, scale: Scale = SCALE, seed: int = 0) -> list[Run]:
    return demo_runs(Setting.of(scale, Text.read(data)), seed)


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


def test_arms_are_what_the_table_says(data: Path, monkeypatch) -> None:
    monkeypatch.setattr(cli_demo, "DEMO", SHALLOW)
    found = runs(data, SMALL)
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
