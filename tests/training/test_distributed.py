"""Two processes on a CPU against one: the same losses, and checkpoints that change hands between world sizes."""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.processes import ranks
from torch.nn.parallel import DistributedDataParallel

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.config import Experiment, OptimizerConfig
from skipless.training.distributed import World
from skipless.training.optim.build import build_optimizer
from skipless.training.run import RunFolder, read_metrics
from skipless.training.trainer import Trainer, train

RUN = """
import faulthandler, sys
from pathlib import Path
from types import SimpleNamespace
faulthandler.dump_traceback_later(200)  # where it hangs, if it does
import torch
torch.set_num_threads(1)
from skipless.training.config import Experiment
from skipless.training.distributed import exit_process
from skipless.training.trainer import train
train(Experiment.from_json(Path(sys.argv[1]).read_text()), sys.argv[2], resume=True, device="cpu", quiet=True)
exit_process()
"""


def changed(experiment: Experiment, **fields) -> Experiment:
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, **fields))


def launched(experiment: Experiment, folder, tmp_path) -> subprocess.Popen:
    """The run in two processes, as torchrun starts them, and in a group of their own, as a terminal has it."""
    script, settings = tmp_path / "run.py", tmp_path / "experiment.json"
    script.write_text(RUN)
    settings.write_text(experiment.to_json())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.Popen(
        [*launcher, str(script), str(settings), str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def ended(run: subprocess.Popen, seconds: float) -> str:
    """What it said until its end, which comes within `seconds`; it is killed otherwise, and said where it hung."""
    try:
        return run.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {seconds} s:\n{run.communicate()[1]}") from None


def by_two(experiment: Experiment, folder, tmp_path) -> None:
    """The run in two processes, to its end."""
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    for rank in ranks(2, RUN, tmp_path / "experiment.json", folder):
        rank.finished(240)


def losses(folder) -> list[float]:
    return [r["loss"] for r in read_metrics(folder) if "loss" in r]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(experiment, tmp_path, strategy):
    """20 steps; every logged loss within 1e-5 of the single process's, and the validation too."""
    torch.set_num_threads(1)
    experiment = changed(experiment, steps=20, log_every=1, checkpoint_every=0, eval_every=20)
    train(experiment, tmp_path / "one", device="cpu", quiet=True)
    by_two(changed(experiment, strategy=strategy), tmp_path / "two", tmp_path)
    alone, together = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(alone) == len(together) == 20
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5


@pytest.mark.parametrize(("strategy", "values"), [("ddp", "trained"), ("fsdp", "trained"), ("fsdp", "identity")])
def test_two_processes_train_mirrored_networks_as_one(experiment, tmp_path, strategy, values):
    """With values that have no matrix, or a frozen one, which stays as it starts to the bit."""
    torch.set_num_threads(1)
    model = experiment.model.replace(mlp_init="mirrored", value_output=values)
    settings = dataclasses.replace(experiment.optimizer, name="muon", role_rates={"value": 0.0, "output": 0.0})
    experiment = dataclasses.replace(experiment, model=model, optimizer=settings)
    experiment = changed(experiment, steps=12, log_every=1, checkpoint_every=0, eval_every=12)
    train(experiment, tmp_path / "one", device="cpu", quiet=True)
    by_two(changed(experiment, strategy=strategy), tmp_path / "two", tmp_path)
    alone, together = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(alone) == len(together) == 12
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    still = [name for name in one if ".value." in name or ".output." in name]
    assert len(still) == (16 if values == "trained" else 0)
    assert all(torch.equal(one[name], two[name]) for name in still)


@pytest.mark.parametrize(("accumulate", "fits", "size"), [(2, 1, 8), (6, 3, 12)])
def test_micro_batches_must_divide_the_rows_of_each_process(experiment, tmp_path, accumulate, fits, size):
    """Rows that no micro-batch takes would be lost without a word."""
    experiment = changed(experiment, batch_size=6, accumulate=accumulate)
    words = f"the 3 rows that each of 2 processes has .* train.accumulate={fits}, or --set train.batch_size={size}$"
    with RunFolder.open(tmp_path, experiment, resume=False) as run, pytest.raises(ValueError, match=words):
        Trainer(experiment, World(0, 2, torch.device("cpu")), run, quiet=True)


class Replicated(DistributedDataParallel):
    """As the optimiser sees it, in a world of one."""

    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module, self.process_group = module, SimpleNamespace(size=lambda: 1)


def test_the_processes_of_a_replicated_model_divide_muons_matrices():
    model = Replicated(Transformer(ModelConfig(vocab_size=9, width=16, depth=2, heads=2)))
    optimizer = build_optimizer(model, OptimizerConfig("muon"))
    assert optimizer.parts[0].replicas is model.process_group


def test_a_replicated_model_must_be_frozen_before():
    """DDP would wait for gradients that never come."""

    model = Transformer(ModelConfig(vocab_size=9, width=16, depth=2, heads=2, activation="gelu"))
    with pytest.raises(ValueError, match=r"role_rates freezes up, but .* call freeze\(model, config\) before"):
        build_optimizer(Replicated(model), OptimizerConfig(role_rates={"up": 0.0}))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_a_checkpoint_of_two_is_taken_up_by_one_and_back(experiment, tmp_path, name):
    """Steps 1–12 sharded over two processes, the rest in one; and the reverse. The losses are those of one process."""
    torch.set_num_threads(1)
    experiment = dataclasses.replace(experiment, optimizer=dataclasses.replace(experiment.optimizer, name=name))
    whole = changed(experiment, log_every=1)
    train(whole, tmp_path / "whole", device="cpu", quiet=True)
    for first, second in (("fsdp", "auto"), ("auto", "fsdp")):
        folder = tmp_path / f"{first}-then-{second}"
        half = changed(whole, strategy=first)
        if first == "fsdp":
            by_two(half, folder, tmp_path)
        else:
            train(half, folder, device="cpu", quiet=True)
        _forget_the_second_half(folder, changed(whole, strategy=second))
        if second == "fsdp":
            by_two(changed(whole, strategy=second), folder, tmp_path)
        else:
            train(changed(whole, strategy=second), folder, resume=True, device="cpu", quiet=True)
        differences = [abs(a - b) for a, b in zip(losses(tmp_path / "whole"), losses(folder), strict=True)]
        assert max(differences) < 1e-5
        final, expected = load_file(folder / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
        assert max((final[k] - expected[k]).abs().max() for k in expected) < 1e-4


def _forget_the_second_half(folder, experiment: Experiment) -> None:
    """What a kill after step 18 would have left, with the strategy changed."""
    (folder / "finished.json").unlink()
    (folder / "hashes.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-000024")
    (folder / "experiment.json").write_text(experiment.to_json())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_of_torchrun_killed_ends_all_and_the_same_command_goes_on(experiment, tmp_path, full, strategy):
    """kill -9 of either, at some step: no process stays behind, and in the end the run is that of a calm one.

    With an optimiser that exchanges matrices, in its step and after it: whole ones, or shards of them.
    """
    settings = dataclasses.replace(experiment.optimizer, name="muon", keep_orthogonal=("value",))
    experiment = dataclasses.replace(experiment, optimizer=settings)
    experiment = changed(experiment, strategy=strategy, log_every=1, checkpoint_every=3, eval_every=0)
    by_two(experiment, tmp_path / "calm", tmp_path)
    run, choice, kills = tmp_path / "run", random.Random(None if full else 0), 0
    while kills < (6 if full else 1):
        if kills and (run / "finished.json").is_file():
            shutil.rmtree(run)  # it was over before its last kill
        wanted = (len(read_metrics(run)) if (run / "metrics.jsonl").is_file() else 0) + choice.randint(4, 9)
        torchrun = launched(experiment, run, tmp_path)
        while torchrun.poll() is None and (not (run / "metrics.jsonl").is_file() or len(read_metrics(run)) < wanted):
            time.sleep(0.01)
        ranks_there = [pid for pid in children(torchrun.pid) if "run.py" in command_line(pid)]
        if len(ranks_there) == 2:
            os.kill(choice.choice(ranks_there), signal.SIGKILL)
            ended(torchrun, 90)
            assert torchrun.returncode != 0
            assert not [pid for pid in ranks_there if "run.py" in command_line(pid)], "the other process stayed behind"
            kills += 1
        else:
            ended(torchrun, 90)
    if not (run / "finished.json").is_file():
        by_two(experiment, run, tmp_path)
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "calm" / "metrics.jsonl").read_bytes()
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "calm" / "model.safetensors").read_bytes()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> str:
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_bytes().decode() if file.exists() else ""


def test_ctrl_c_stops_all_processes_after_the_same_step(experiment, tmp_path):
    """A terminal's Ctrl-C reaches each of them at another step, and torchrun hands it on a second time."""
    experiment = changed(experiment, steps=4000, checkpoint_every=0, eval_every=0, log_every=3, strategy="fsdp")
    run, metrics = launched(experiment, tmp_path / "run", tmp_path), tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text()) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    complaint, last = ended(run, 60), read_metrics(tmp_path / "run")[-1]["step"]
    assert last % 3 == 0
    assert complaint.count(f"stopped after step {last}; go on with --resume") == 2, complaint
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{last:06d}"]


@pytest.mark.catalogue(1)
@pytest.mark.parametrize("killed", [0, 1])
def test_the_survivor_of_a_killed_process_says_so_in_one_line(experiment, tmp_path, killed):
    """Without torchrun, which would end it first."""
    settings, run = tmp_path / "experiment.json", tmp_path / "run"
    settings.write_text(changed(experiment, log_every=1, eval_every=0, steps=100_000).to_json())
    words = ("train", settings, "--out", run, "--device", "cpu")
    both = ranks(2, "from skipless.cli import main; main()", *words)
    try:
        while not (run / "metrics.jsonl").is_file() or len(read_metrics(run)) < 3:
            assert both[0].poll() is both[1].poll() is None, [each.outputs() for each in both]
            time.sleep(0.05)
        both[killed].signal(signal.SIGKILL)
        survivor = both[1 - killed]
        assert survivor.wait(60) == 2
        complaint = survivor.outputs()[1].splitlines()
        assert not any("Traceback" in line for line in complaint)
        said = [line for line in complaint if line.startswith("skipless: ")]
        assert [f"process {1 - killed} lost another one of the 2 that train together" in line for line in said] == [
            True
        ]
    finally:
        for each in both:
            if each.poll() is None:
                each.signal(signal.SIGKILL)
