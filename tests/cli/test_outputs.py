"""What commands write: never over a file that they read, nor over one that they have not made."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.checkpoint import save_weights
from skipless.training.config import DataConfig, Experiment, TrainConfig

PRECIOUS = "three years of work\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run with a log and a probe, a text, an inspection and a folder of results: all that commands read."""
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=256, width=16, depth=2, heads=2, length=16, activation="gelu"))
    run = folder / "run"
    save_weights(model, run / "model.safetensors")
    experiment = Experiment("tiny", model.config, DataConfig(folder="gone"), train=TrainConfig(steps=9, warmup=1))
    (run / "experiment.json").write_text(experiment.to_json())
    (run / "finished.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "ema": 3.0}\n')
    (run / "probes").mkdir()
    np.savez(run / "probes" / "step-000001.npz", step=1, states=np.stack([np.eye(4)] * 3))
    (folder / "text.txt").write_text("The signal dies by block six. " * 20)
    arguments = ["inspect", str(run), "--length", "8", "--batch", "1", "--json", str(folder / "inspection.json")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return folder


def commands(place: Path) -> dict[str, list[str]]:
    """Every option that names a file to be written, with a command that it can end."""
    run, text = str(place / "run"), str(place / "text.txt")
    inspect = ["inspect", run, "--length", "8", "--batch", "1", "--text", text, "--tokenizer", "bytes"]
    kernels = ["kernels", "e-spa", "--depth", "4", "--length", "16"]
    return {
        "report --out": ["report", run, str(place / "inspection.json"), "--out"],
        "inspect --json": [*inspect, "--json"],
        "inspect --figure": [*inspect, "--figure"],
        "kernels --json": [*kernels, "--json"],
        "kernels --figure": [*kernels, "--figure"],
        "eval --json": ["eval", run, "--corpus", text, "--tokenizer", "bytes", "--json"],
    }


NAMES = list(commands(Path()))


def suffix(name: str) -> str:
    return {"--out": ".html", "--json": ".json", "--figure": ".png"}[name.split()[1]]


def invoke(*arguments: object):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_there_is_left_alone(place, tmp_path, name):
    """One of the user's, also by a symlink; a page, data and a picture of something else."""
    path = tmp_path / f"mine{suffix(name)}"
    path.write_text(PRECIOUS)
    (tmp_path / f"link{suffix(name)}").symlink_to(path)
    for target in (path, tmp_path / f"link{suffix(name)}"):
        done = invoke(*commands(place)[name], target)
        assert "is there, and this command has not written it: name another file" in str(done.exception)
    assert path.read_text() == PRECIOUS
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_output_is_replaced(place, tmp_path, name):
    path = tmp_path / f"new{suffix(name)}"
    for _ in range(2):
        done = invoke(*commands(place)[name], path)
        assert done.exit_code == 0, done.exception
        assert path.stat().st_size > 100
    path.write_bytes(b"")  # as mktemp makes them
    assert invoke(*commands(place)[name], path).exit_code == 0


@pytest.mark.parametrize("end", [".pdf", ".svg"])
def test_pictures_of_every_kind_know_their_maker(place, tmp_path, end):
    for _ in range(2):
        assert invoke(*commands(place)["kernels --figure"], tmp_path / f"new{end}").exit_code == 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_command_reads_is_written_over(place, name):
    """Also what it finds by itself: the log, the probes, the weights and the settings of a run."""
    read = [path for path in place.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in read}
    assert len(read) >= 7
    for path in read:
        if name.endswith("--json") and path.name == "inspection.json" and name != "report --out":
            continue  # an earlier output of the same kind, which none of these reads
        done = invoke(*commands(place)[name], path)
        assert done.exit_code != 0, path
        assert {path: path.read_bytes() for path in read} == before
    assert {path for path in place.rglob("*") if path.is_file()} == {*read}


FOLDERS = {
    "demo": ["demo", "--steps", "1", "--out"],
    "reproduce": ["reproduce", "kernels", "--out"],
    "prepare": ["prepare", __file__, "--bytes", "--out"],
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("there", ["notes.txt", "results.json", "README.md", ".hidden", "kernels.json", "movie.part"])
def test_a_folder_of_other_files_is_left_alone(tmp_path, name, there):
    (tmp_path / there).write_text(PRECIOUS)
    done = invoke(*FOLDERS[name], tmp_path)
    assert f"holds other files ({there})" in str(done.exception)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, PRECIOUS)]


@pytest.mark.parametrize("there", ["results.json", "sample.txt", "demo.png"])
def test_a_demo_takes_no_file_for_its_own_before_it_has_written_it(tmp_path, there):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "options.json").write_text("{}")
    (tmp_path / there).write_text(PRECIOUS)
    for more in ([], ["--fresh"]):
        done = invoke("demo", "--steps", 1, "--out", tmp_path, *more)
        assert f"{there} is there, and no demo has written it" in str(done.exception)
    assert (tmp_path / there).read_text() == PRECIOUS


def test_the_index_of_results_replaces_only_itself(tmp_path):
    assert invoke("reproduce", "--index", "--out", tmp_path).exit_code == 0
    assert invoke("reproduce", "--index", "--out", tmp_path).exit_code == 0
    (tmp_path / "README.md").write_text(PRECIOUS)
    assert "this command has not written it" in str(invoke("reproduce", "--index", "--out", tmp_path).exception)
    assert (tmp_path / "README.md").read_text() == PRECIOUS


def test_an_experiment_from_elsewhere_trains_in_runs_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert invoke("prepare", __file__, "--bytes", "--out", "tokens").exit_code == 0
    model = ModelConfig(vocab_size=256, width=16, depth=2, heads=2, length=16, activation="gelu")
    train = TrainConfig(steps=2, warmup=1, batch_size=2, compile=False)
    experiment = Experiment("../../escaped", model, DataConfig(folder="tokens"), train=train)
    Path("foreign.json").write_text(experiment.to_json())
    done = invoke("train", "foreign.json")
    assert "name is '../../escaped', and runs/NAME leads out of runs/" in str(done.exception)
    assert sorted(os.listdir(tmp_path)) == ["deep"]
    assert json.loads(Path("foreign.json").read_text())["name"] == "../../escaped"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("report")])
def test_results_outlive_the_reader_of_the_table(place, tmp_path, monkeypatch, name):
    def gone(*_) -> None:
        raise BrokenPipeError

    command = name.split()[0]
    monkeypatch.setattr(f"skipless.cli.{command.replace('eval', 'evaluate')}.print_table", gone)
    path = tmp_path / f"found{suffix(name)}"
    invoke(*commands(place)[name], path)
    found = path.read_bytes()
    assert found.startswith(b"\x89PNG") if path.suffix == ".png" else json.loads(found)


@pytest.mark.parametrize("option", ["length", "max-tokens", "limit"])
def test_counts_of_an_evaluation_are_checked_before_the_model_is_opened(place, option, monkeypatch):
    monkeypatch.delattr("skipless.cli.evaluate.load_model")
    result = invoke("eval", place / "run", f"--{option}", "0")
    assert f"--{option} is 0; it must be at least 1, or left out for" in str(result.exception)


def test_an_evaluation_names_a_text_that_is_empty(place, tmp_path):
    (tmp_path / "empty.txt").touch()
    result = invoke("eval", place / "run", "--corpus", tmp_path / "empty.txt", "--tokenizer", "bytes")
    assert f"{tmp_path / 'empty.txt'} holds no text to evaluate on" in str(result.exception)
