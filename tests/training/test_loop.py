import dataclasses
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.processes import Program

from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes, TrainUnigram
from skipless.files import read_json
from skipless.model.config import ModelConfig
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.training import trainer
from skipless.training.config import Experiment, OptimizerConfig
from skipless.training.divergence import Diverged, advice
from skipless.training.load import load
from skipless.training.run import Display, RunFinishedError, read_metrics, read_result
from skipless.training.trainer import OutOfTime, RunLimits, Trainer, train

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from skipless.training.config import Experiment
from skipless.training.trainer import train
train(Experiment.from_json(Path(sys.argv[1]).read_text()), sys.argv[2], resume=True, device="cpu", quiet=True)
"""


def changed(experiment: Experiment, **train_fields) -> Experiment:
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, **train_fields))


def test_a_run_learns_and_writes_everything(experiment, tmp_path):
    result = train(changed(experiment, probe_at=(0, 12)), tmp_path / "run", device="cpu", quiet=True)
    losses = [r["loss"] for r in read_metrics(tmp_path / "run") if "loss" in r]
    uniform = np.log(256)  # half a nat below the loss at initialisation
    assert losses[-1] < uniform
    assert result.valid.loss < uniform
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert {"experiment.json", "env.json", "metrics.jsonl", "finished.json"} <= set(os.listdir(tmp_path / "run"))
    states = np.load(tmp_path / "run" / "probes" / "step-00000012.npz")["states"]
    assert states.shape == (9, 32, 32)
    assert read_result(tmp_path / "run")["steps"] == 24
    with pytest.raises(RunFinishedError, match="finished"):
        train(changed(experiment, probe_at=(0, 12)), tmp_path / "run", resume=True, device="cpu", quiet=True)


def test_validation_in_the_log_is_the_models(experiment, tmp_path):
    """bits per byte = loss / ln 2 · tokens / bytes, and every interval has its line."""
    train(experiment, tmp_path / "run", device="cpu", quiet=True)
    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records if "loss" in r] == [5, 6, 10, 12, 15, 18, 20, 24]
    valid = [r for r in records if "valid_loss" in r]
    assert [r["step"] for r in valid] == [12, 24]
    assert valid[-1]["valid_perplexity"] == pytest.approx(np.exp(valid[-1]["valid_loss"]))


def test_validation_on_another_folder_wants_the_same_tokens(experiment, prepared, tmp_path):
    """One that cannot serve was asked for all the same, so that training does not go on without."""

    def validated(folder):
        data = dataclasses.replace(experiment.data, valid=str(folder))
        train(changed(dataclasses.replace(experiment, data=data), steps=12), tmp_path / "run", device="cpu", quiet=True)

    text = Path(trainer.__file__).parent
    with pytest.raises(ValueError, match=r"data\.valid=.*mistyped cannot serve .* is not a prepared folder"):
        validated(tmp_path / "mistyped")
    prepare(Preparation(str(text), TrainUnigram(500, 0.2), valid_fraction=0.5), tmp_path / "pieces", workers=1)
    with pytest.raises(
        ValueError, match=r"data\.valid=.*pieces cannot .* \(bytes, 256 pieces.*did not make the shards"
    ):
        validated(tmp_path / "pieces")
    prepare(Preparation(str(text), Bytes(), valid_fraction=0.5), tmp_path / "bytes", workers=1)
    validated(tmp_path / "bytes")
    assert read_result(tmp_path / "run")["valid"]["loss"] > 0


@pytest.mark.parametrize("harm", ["log", "folder", "shard"])
def test_what_is_taken_away_during_a_run_ends_it_with_its_name(experiment, tmp_path, monkeypatch, harm):
    """By another program, between two steps. The same command goes on once it is there again."""
    data = tmp_path / "tokens"
    shutil.copytree(experiment.data.folder, data)
    experiment = experiment.with_fields({"data.folder": str(data)})
    evaluate, run = Trainer.evaluate, tmp_path / "run"

    def take_away(trainer: Trainer) -> None:
        evaluate(trainer)
        if harm == "log":
            (run / "metrics.jsonl").unlink()
        elif harm == "folder":
            shutil.rmtree(run)
        else:
            os.truncate(data / "train-00000.bin", 100)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", take_away)
        with pytest.raises((OSError, ValueError), match=r"metrics\.jsonl could not be .* deleted or|bin was cut short"):
            train(experiment, run, device="cpu", quiet=True)
    assert not (run / "finished.json").exists()
    if harm == "log":
        train(experiment, run, resume=True, device="cpu", quiet=True)


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_every_optimiser_resumes_bit_for_bit(experiment, tmp_path, monkeypatch, name):
    """Stopped by an error in the middle of step 15, taken up from step 12."""
    experiment = dataclasses.replace(experiment, optimizer=dataclasses.replace(experiment.optimizer, name=name))
    train(experiment, tmp_path / "whole", device="cpu", quiet=True)
    with monkeypatch.context() as patch:
        _poison(patch, 15)
        with pytest.raises(Diverged):
            train(experiment, tmp_path / "stopped", device="cpu", quiet=True)
    train(experiment, tmp_path / "stopped", resume=True, device="cpu", quiet=True)
    whole, again = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "stopped"))
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "stopped" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("readers", [0, 2])
def test_kill_9_and_resume_is_the_uninterrupted_run_bit_for_bit(experiment, tmp_path, readers):
    """Killed after step 10 and after step 18, where its log has three and six lines: same weights, same log.

    With heads that read it is a mirrored network with Muon, as `mirrored/e-spa-readers` trains.
    """
    if readers:
        mirrored = {"mlp_init": "mirrored", "value_output": "identity", "bias_gain": True, "activation": "gelu"}
        muon = OptimizerConfig("muon", 2e-3, 1e-2, gain_rate=1e-2)
        model = experiment.model.replace(readers=readers, **mirrored)
        experiment = dataclasses.replace(experiment, model=model, optimizer=muon)
    train(experiment, tmp_path / "whole", device="cpu", quiet=True)
    (tmp_path / "e.json").write_text(experiment.to_json())
    log, kills = tmp_path / "killed" / "metrics.jsonl", 0
    for lines in (3, 6):
        process = Program(RUN, tmp_path / "e.json", tmp_path / "killed")
        while process.poll() is None and not (log.is_file() and log.read_text().count("\n") >= lines):
            time.sleep(0.001)
        process.signal(signal.SIGKILL)
        kills += process.wait(60) == -signal.SIGKILL
    assert kills > 0
    if not (tmp_path / "killed" / "finished.json").is_file():
        Program(RUN, tmp_path / "e.json", tmp_path / "killed").finished()
    whole, killed = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "killed" / "metrics.jsonl").read_text()


def test_ctrl_c_saves_and_says_how_to_go_on(experiment, tmp_path):
    experiment = changed(experiment, steps=4000, checkpoint_every=0, eval_every=0, log_every=1)
    (tmp_path / "e.json").write_text(experiment.to_json())
    process = Program(RUN, tmp_path / "e.json", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None, process.outputs()
        time.sleep(0.05)
    process.signal(signal.SIGINT)
    process.wait(60)
    assert "go on with --resume" in process.outputs()[1]
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{last:06d}"]


def test_the_log_of_a_run_that_was_stopped_is_the_uninterrupted_ones(experiment, tmp_path, monkeypatch):
    """Stopped after step 8, where no line is due, it logs one, and takes it back when it goes on."""
    train(experiment, tmp_path / "whole", device="cpu", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "stop_reason", lambda live, *_: KeyboardInterrupt if live.state.step == 8 else None)
        with pytest.raises(KeyboardInterrupt, match="after step 8"):
            train(experiment, tmp_path / "stopped", device="cpu", quiet=True)
    assert read_metrics(tmp_path / "stopped")[-1]["step"] == 8
    train(experiment, tmp_path / "stopped", resume=True, device="cpu", quiet=True)
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "stopped" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("fields", "limits", "steps"),
    [
        ({"eval_every": 8}, RunLimits(), [8, 16, 20]),
        ({"eval_every": 0}, RunLimits(), [20]),
        ({"eval_every": 8, "eval_tokens": 0}, RunLimits(), []),
        ({"eval_every": 0}, RunLimits(validation=False), []),
    ],
)
def test_a_run_is_judged_on_the_way_and_at_its_end(experiment, tmp_path, fields, limits, steps):
    """eval_every=0 leaves out those on the way; only a run whose steps are timed ends without one."""
    result = train(changed(experiment, steps=20, **fields), tmp_path / "run", device="cpu", quiet=True, limits=limits)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "valid_loss" in line] == steps
    assert (result.valid is not None) == bool(steps)


def test_accumulation_gives_the_gradient_of_the_whole_batch(experiment, tmp_path):
    train(changed(experiment, steps=6), tmp_path / "one", device="cpu", quiet=True)
    train(changed(experiment, steps=6, accumulate=2), tmp_path / "two", device="cpu", quiet=True)
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    for key in one:
        torch.testing.assert_close(one[key], two[key], atol=2e-4, rtol=0)


def test_a_process_that_trains_many_networks_keeps_them_compiled(experiment, tmp_path, monkeypatch):
    """Past torch's own limit of eight a network would run on in eager mode, slower and rounded otherwise."""
    limits, log = [torch._dynamo.config.recompile_limit], Trainer.log
    monkeypatch.setattr(Trainer, "log", lambda self: limits.append(torch._dynamo.config.recompile_limit) or log(self))
    train(experiment, tmp_path / "run", device="cpu", quiet=True)
    assert limits[1] >= 100
    assert torch._dynamo.config.recompile_limit == limits[0]


def test_recomputing_activations_changes_nothing(experiment, tmp_path):
    train(changed(experiment, steps=6), tmp_path / "kept", device="cpu", quiet=True)
    train(changed(experiment, steps=6, recompute=True), tmp_path / "recomputed", device="cpu", quiet=True)
    kept, again = (load_file(tmp_path / run / "model.safetensors") for run in ("kept", "recomputed"))
    assert all(torch.equal(kept[key], again[key]) for key in kept)


def _poison(monkeypatch, call: int) -> None:
    """Make the loss of one micro-batch NaN."""
    honest, calls = trainer.cross_entropy, []

    def failing(model, batch, packed):
        calls.append(1)
        return honest(model, batch, packed) * (float("nan") if len(calls) == call else 1.0)

    monkeypatch.setattr(trainer, "cross_entropy", failing)


def test_divergence_stops_with_the_step_the_blocks_and_the_last_good_checkpoint(experiment, tmp_path, monkeypatch):
    _poison(monkeypatch, 9)
    with pytest.raises(Diverged, match=r"at step 9: loss nan.*Norms per block.*last good checkpoint is step-000006"):
        train(experiment, tmp_path / "run", device="cpu", quiet=True)


def test_a_rate_far_too_high_is_caught_and_explained(experiment, tmp_path):
    rates = dataclasses.replace(experiment.optimizer, rate=1e6, clip=None)
    with pytest.raises(Diverged, match=r"lower optimizer.rate.*There is no good checkpoint"):
        train(dataclasses.replace(experiment, optimizer=rates), tmp_path / "run", device="cpu", quiet=True)


RUINOUS = {
    "adam": ("optimizer.rate=1e38",),
    "adamw": ("optimizer.name=adamw", "optimizer.rate=1e38", "optimizer.weight_decay=1000"),
    "soap": ("optimizer.name=soap", "optimizer.rate=1e38"),
    "muon": ("optimizer.name=muon", "optimizer.rate=1e38"),
    "embedding": ("optimizer.embedding_rate=1e38",),
    "vectors": ("optimizer.vector_rate=1e38",),
    "finite, but ruined": ("optimizer.rate=1e30", "optimizer.clip=none"),
}


@pytest.mark.parametrize("case", RUINOUS)
def test_a_checkpoint_that_is_called_good_is_finite_and_goes_on(experiment, tmp_path, case):
    """A loss and a gradient are those before the update, which may be what ruins the network."""
    every = ("train.checkpoint_every=1", "train.log_every=1", "train.eval_every=0", "train.keep=9")
    ruinous = experiment.override(*every, *RUINOUS[case])
    with pytest.raises(Diverged, match=r"diverged at step \d+") as error:
        train(ruinous, tmp_path / "run", device="cpu", quiet=True)
    for file in (tmp_path / "run").glob("checkpoints/*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())
    named = re.search(r"The last good checkpoint is (step-\d+)", str(error.value))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    last = f"step-{error.value.good:06d}"
    assert (named[1] if named else None) == (last if last in saved else None)


@pytest.mark.parametrize("change", ["optimizer.eps=0", "optimizer.eps=1e-45", "optimizer.weight_decay=1e38"])
def test_settings_that_ruin_a_network_are_refused(experiment, change):
    with pytest.raises(ValueError, match=r"eps is .*use 1e-30 or more|weight_decay is .*at most 1000"):
        experiment.override(change)


def test_a_run_that_cannot_fit_is_refused_before_it_is_built(experiment, tmp_path):
    for change in ("train.batch_size=1000000000", "model.depth=100000000"):
        with pytest.raises(ValueError, match=r"this run takes at least [\d,.]+ GB"):
            train(experiment.override(change), tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.parametrize(("name", "skipless"), [("wikitext103/e-spa", True), ("wikitext103/pre-ln", False)])
def test_what_to_do_follows_from_the_network(name, skipless):
    words = advice(Transformer(preset(name, width=32, heads=1, vocab_size=40, length=16), impl="sdpa"))
    assert ("--set optimizer.role_rates.up=0.2" in words) is skipless
    assert "train.on_divergence=halve-lr" in words


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_failure_to_compile_names_the_way_around_it(experiment, tmp_path, monkeypatch, compiled):
    failure = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})

    def fails(*_):
        raise failure("No working C++ compiler found\nand much more")

    monkeypatch.setattr(trainer, "cross_entropy", fails)
    expected, words = (ValueError, r"compiler found\); .*--set train.compile=false") if compiled else (failure, "more")
    with pytest.raises(expected, match=words):
        train(changed(experiment, compile=compiled), tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_ctrl_c_that_ends_the_compiler_is_no_failure_to_compile(experiment, tmp_path, monkeypatch):
    """A terminal tells the C++ compiler too, which then fails."""
    failure = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})

    def fails(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise failure("C++ compile error")

    monkeypatch.setattr(trainer, "cross_entropy", fails)
    with pytest.raises(KeyboardInterrupt, match="being compiled; go on with --resume"):
        train(changed(experiment, compile=True), tmp_path / "run", device="cpu", quiet=True)


def test_divergence_can_go_back_and_halve_the_rate(experiment, tmp_path, monkeypatch, caplog):
    """A loss that is not finite once: the run goes back to its checkpoint and ends with half the rate."""
    _poison(monkeypatch, 9)
    train(changed(experiment, on_divergence="halve-lr"), tmp_path / "run", device="cpu", quiet=True)
    assert "Goes back to step 6 with 0.5 of the rate" in caplog.text
    assert read_result(tmp_path / "run")["steps"] == 24


def test_a_checkpoint_that_is_ruined_already_is_left_behind(experiment, tmp_path, monkeypatch, caplog):
    """What was saved after step 6 diverges at step 7 whatever the rate: the run starts over, on the display it has."""
    honest, saves, displays = Trainer.checkpoint, [], []

    def ruined(live):
        saves.append(live.state.step)
        if len(saves) == 1:
            next(live.model.parameters()).data.fill_(float("nan"))
        honest(live)

    def counted(*arguments, **options):
        displays.append(Display(*arguments, **options))
        return displays[-1]

    monkeypatch.setattr(Trainer, "checkpoint", ruined)
    monkeypatch.setattr(trainer, "Display", counted)
    train(changed(experiment, on_divergence="halve-lr"), tmp_path / "run", device="cpu", quiet=True)
    assert "diverged at step 7" in caplog.text
    places = [words for record in caplog.records if "Goes back" in (words := record.getMessage())]
    assert [words.partition("Goes back to ")[2] for words in places] == [
        "step 6 with 0.5 of the rate.",
        "step 0 with 0.25 of the rate.",
    ]
    assert [record["step"] for record in read_metrics(tmp_path / "run") if "loss" in record][:3] == [5, 6, 10]
    assert (read_result(tmp_path / "run")["steps"], len(displays)) == (24, 1)


def test_mistakes_before_training_are_named(experiment, tmp_path):
    small = dataclasses.replace(experiment, model=experiment.model.replace(vocab_size=100))
    with pytest.raises(ValueError, match=r"vocab_size=100 is smaller than the 256 tokens.*--set model.vocab_size=256"):
        train(small, tmp_path / "a", device="cpu", quiet=True)
    train(changed(experiment, steps=5), tmp_path / "a", device="cpu", quiet=True)  # as it was told to
    nowhere = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, folder=None))
    with pytest.raises(ValueError, match=r"data\.folder is not set"):
        train(nowhere, tmp_path / "b", device="cpu", quiet=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU; use --device cpu"):
            train(experiment, tmp_path / "c", device="cuda", quiet=True)


def test_a_run_in_pieces_is_the_same_run(tmp_path, experiment) -> None:
    whole = train(experiment, tmp_path / "whole", quiet=True)
    for step in (1, 2, 3):  # time is up after one step
        with pytest.raises(OutOfTime, match=f"stopped after step {step}"):
            train(experiment, tmp_path / "pieces", resume=True, quiet=True, limits=RunLimits(0.0))
    train(experiment, tmp_path / "pieces", resume=True, quiet=True)
    assert whole.weights is not None
    assert (tmp_path / "pieces" / whole.weights.name).read_bytes() == whole.weights.read_bytes()
    logs = [{r["step"]: r for r in read_metrics(tmp_path / name)} for name in ("whole", "pieces")]
    assert logs[0].items() <= logs[1].items()  # each piece logs its last step too


def test_a_run_without_weights_keeps_its_log(tmp_path, experiment) -> None:
    quick = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, checkpoint_every=0))
    result = train(quick, tmp_path / "run", quiet=True, limits=RunLimits(weights=False))
    assert result.weights is None
    assert result.step_seconds > 0.0
    assert read_result(tmp_path / "run")["weights"] is None
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert read_metrics(tmp_path / "run")[-1]["step"] == quick.train.steps
    with pytest.raises(ValueError, match="finished"):
        train(quick, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize("scheme", [ExponentialSPA(gammas=(2.0, 0.9, 0.1)), UniformSPA(rhos=[0.1, 0.5, 0.6])])
def test_a_schedule_by_block_comes_back_from_json_and_from_a_stopped_run(tmp_path, experiment, scheme) -> None:
    model = experiment.model.replace(scheme=scheme, depth=3)
    assert ModelConfig.from_json(model.to_json()) == model
    assert experiment.with_fields({"model.scheme": scheme, "model.depth": 3}).model == model
    with pytest.raises(ValueError, match="is for 3 blocks, and depth=4; use depth=3"):
        model.replace(depth=4)
    quick = dataclasses.replace(experiment, model=model, train=dataclasses.replace(experiment.train, steps=6))
    whole = train(quick, tmp_path / "whole", quiet=True)
    with pytest.raises(OutOfTime):
        train(quick, tmp_path / "pieces", quiet=True, limits=RunLimits(0.0))
    read = read_json(tmp_path / "pieces" / "experiment.json", Experiment.from_dict)
    assert read == quick
    train(read, tmp_path / "pieces", resume=True, quiet=True)
    assert whole.weights is not None
    assert (tmp_path / "pieces" / whole.weights.name).read_bytes() == whole.weights.read_bytes()
    assert load(tmp_path / "pieces").config.scheme == scheme
