"""`skipless export`: a folder that is whole, or as it was."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.hf.modeling import SkiplessForCausalLM
from skipless.hf.tokenizer import byte_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.checkpoint import save_weights
from skipless.training.config import DataConfig, Experiment, TrainConfig
from skipless.training.load import load_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run that carries its tokenizer."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=256, width=32, depth=2, heads=4, length=16, activation="gelu"))
    experiment = Experiment("tiny", model.config, DataConfig(folder="gone"), train=TrainConfig(steps=9, warmup=1))
    folder = tmp_path / "run"
    save_weights(model, folder / "model.safetensors")
    byte_tokenizer().save_pretrained(folder)
    (folder / "experiment.json").write_text(experiment.to_json())
    return folder


def export(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_place_that_cannot_hold_an_export_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in str(export(run, "--out", tmp_path / "file").exception)
    before = (run / "model.safetensors").read_bytes()
    assert f"give --out {run / 'export'}" in str(export(run, "--out", run).exception)
    assert (run / "model.safetensors").read_bytes() == before


def test_a_run_of_bytes_needs_its_data_no_more(run, tmp_path):
    for file in run.glob("tokenizer*"):
        file.unlink()
    assert "or write --tokenizer bytes" in str(export(run).exception)
    words = ["generate", str(run), "--prompt", "a", "--max-new-tokens", "2", "--tokenizer", "bytes"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert export(run, "--tokenizer", "bytes").exit_code == 0
    shutil.rmtree(run / "export")
    (run / "finished.json").write_text("{}")
    assert export(run, "--out", tmp_path / "out").exit_code == 0
    assert load_model(tmp_path / "out").tokenizer.end == 0xFF


def test_an_export_that_fails_changes_nothing(run, monkeypatch):
    assert export(run).exit_code == 0
    (run / "export" / "notes.txt").write_text("mine")
    (run / "export" / ".unfinished").mkdir()
    there = names(run / "export") - {".unfinished"}
    before = (run / "export" / "config.json").read_bytes()

    def full(_, folder):
        (Path(folder) / "config.json").write_text("{")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(SkiplessForCausalLM, "save_pretrained", full)
        complaint = export(run).exception
    assert isinstance(complaint, ValueError)
    assert "No space left" in str(complaint)
    assert str(complaint).endswith("make room there, and export again")
    assert (names(run / "export"), (run / "export" / "config.json").read_bytes()) == (there, before)
    assert export(run).exit_code == 0
    assert names(run / "export") == there


def test_weights_cut_short_are_named_with_the_remedy(run):
    assert export(run).exit_code == 0
    weights = run / "export" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"export does not load .* cut short .* `skipless export RUN`"):
        load_model(run / "export")
