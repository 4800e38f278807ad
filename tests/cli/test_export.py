"""`skipless export`: a folder that is whole, or as it was."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.data.tokenizer import train_tokenizer
from skipless.files import write_hashes
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


def test_the_card_says_what_a_reader_looks_for(run):
    lines = [
        {"step": 5, "loss": 3.0, "ema": 3.1},
        {"step": 9, "loss": 2.0, "ema": 2.5},
        {"step": 9, "valid_loss": 2.25},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert export(run).exit_code == 0
    card = (run / "export" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "# run\nA transformer without skip connections and without normalisation layers" in card
    assert "| blocks | 2 of width 32, 4 heads (4 for keys and values); MLPs of 128 units, gelu |" in card
    assert "ExponentialSPA(" in card
    weights = load_file(run / "export" / "model.safetensors").values()
    assert f"| parameters | {sum(weight.numel() for weight in weights):,} |" in card
    assert "| experiment | tiny |\n| data | gone |" in card
    assert "| training loss, smoothed | 2.5000 at step 9 |\n| validation loss | 2.2500 at step 9 |" in card
    code = card[card.index("```python\n") + 10 :].partition("```")[0]
    names: dict = {}
    exec(code.replace('"."', repr(str(run / "export"))), names)
    assert isinstance(names["model"], SkiplessForCausalLM)
    assert str(run.parent) not in card  # paths stay at home
    assert len({file.stat().st_mode for file in (run / "export").iterdir()}) == 1  # all readable alike


def test_it_says_one_line_and_shows_no_bar_of_transformers(run):
    logging.enable_progress_bar()  # as in a new process
    done = export(run)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


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
    there = names(run / "export")
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


def test_every_file_of_an_export_is_verified(run):
    """One flipped bit, or a cut, in any of them: no reader takes it."""
    assert export(run).exit_code == 0
    folder = run / "export"
    assert set(json.loads((folder / "hashes.json").read_text())["files"]) == names(folder) - {"hashes.json"}
    assert load_model(folder).origin == str(folder)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for damaged in (
            whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 4]) + whole[len(whole) // 2 + 1 :],
            whole[:-9],
        ):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{file.name} is damaged"):
                load_model(folder)
            if not file.name.startswith("tokenizer"):
                with pytest.raises((ValueError, OSError)):  # of config.json transformers may complain first
                    AutoModelForCausalLM.from_pretrained(folder)
            text = ["inspect", str(folder), "--corpus", "stdlib", "--length", "16", "--batch", "1"]
            assert f"{file.name} is damaged" in str(CliRunner().invoke(app, text).exception)
        file.write_bytes(whole)
    assert load_model(folder).origin == str(folder)


def test_what_no_export_wrote_is_read_and_said_to_be_unverified(run, caplog):
    assert export(run).exit_code == 0
    folder = run / "export"
    load_model(folder)
    assert not caplog.text
    SkiplessForCausalLM.from_pretrained(folder).save_pretrained(folder)
    assert not (folder / "hashes.json").exists(), "they would no longer be true"
    load_model(folder)
    assert "export is read unverified" in caplog.text


def test_weights_cut_short_are_named_with_the_remedy(run):
    assert export(run).exit_code == 0
    weights = run / "export" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    (run / "export" / "hashes.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, cut short .* `skipless export RUN`"):
        load_model(run / "export")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_file_that_no_export_wrote_is_replaced_only_on_demand(run, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("precious")
    refused = export(run, "--out", tmp_path / "out")
    assert f"{name} is there, and not as an export wrote it" in str(refused.exception)
    assert (names(tmp_path / "out"), (tmp_path / "out" / name).read_text()) == ({name}, "precious")
    assert export(run, "--out", tmp_path / "out", "--force").exit_code == 0
    (tmp_path / "out" / name).write_text("changed by hand")
    assert "not as an export wrote it" in str(export(run, "--out", tmp_path / "out").exception)
    assert (tmp_path / "out" / name).read_text() == "changed by hand"


def other(run: Path) -> None:
    """The same run with another network."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig(vocab_size=256, width=16, depth=3, heads=2, length=16, activation="gelu"))
    save_weights(model, run / "model.safetensors")
    experiment = Experiment.from_json((run / "experiment.json").read_text())
    (run / "experiment.json").write_text(replace(experiment, model=model.config).to_json())


def depth_of(folder: Path) -> int:
    """Of the export there, by its config and by its weights; 0 where there is no config, so that nothing is loaded."""
    if not (folder / "config.json").is_file():
        return 0
    depth = json.loads((folder / "config.json").read_text())["depth"]
    assert f"model.blocks.{depth - 1}.mlp.inner.up.weight" in load_file(folder / "model.safetensors")
    assert f"model.blocks.{depth}.mlp.inner.up.weight" not in load_file(folder / "model.safetensors")
    return depth


def test_a_kill_between_any_two_steps_leaves_the_old_export_or_the_new_one_or_none(run, monkeypatch):
    """Of every file that is removed or renamed, the process ends just before."""
    assert export(run).exit_code == 0
    shutil.copytree(run / "export", run / "old")
    other(run)
    depths, count = [], 0
    while depths[-1:] != [3]:
        shutil.rmtree(run / "export")
        shutil.copytree(run / "old", run / "export")
        left = [count]

        def dying(real, left=left):
            def act(path, *arguments, **options):
                if path.parent == run / "export" or path.parent.parent == run / "export":
                    if not left[0]:
                        raise Killed
                    left[0] -= 1
                return real(path, *arguments, **options)

            return act

        with monkeypatch.context() as patch:
            for name in ("unlink", "replace"):
                patch.setattr(Path, name, dying(getattr(Path, name)))
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill tidies nothing up
            with suppress(Killed):
                export(run)
        depths.append(depth_of(run / "export"))
        assert export(run).exit_code == 0, "the same command goes on"
        assert depth_of(run / "export") == 3
        assert not [name for name in names(run / "export") if "skipless-" in name]
        count += 1
    assert depths == sorted(depths, key=[2, 0, 3].index)
    assert {2, 0, 3} == set(depths)


class Killed(BaseException):
    """Ends a command where it stands."""


def test_the_files_of_an_older_export_that_the_new_one_lacks_go(run):
    assert export(run).exit_code == 0
    stale = run / "export" / "model.safetensors.index.json"
    stale.write_text("{}")
    write_hashes(run / "export", names(run / "export") - {"hashes.json"})
    assert export(run).exit_code == 0
    assert not stale.exists()


def test_an_export_remembers_that_its_run_was_packed(run):
    file = run / "experiment.json"
    assert export(run).exit_code == 0
    assert not load_model(run / "export").packed
    file.write_text(file.read_text().replace('"packed": false', '"packed": true'))
    assert load_model(run).packed
    assert export(run).exit_code == 0
    assert load_model(run / "export").packed
    SkiplessForCausalLM.from_pretrained(run / "export").save_pretrained(run / "again")
    shutil.copy(run / "export" / "tokenizer.json", run / "again")
    shutil.copy(run / "export" / "tokenizer_config.json", run / "again")
    assert load_model(run / "again").packed


@pytest.mark.parametrize("known", [True, False])
def test_a_tokenizer_of_another_vocabulary_is_refused(run, tmp_path, known):
    """Whether the run's own is there to compare with, or only the number of tokens."""
    text = (Path(__file__).read_text() + "\n") * 20
    tokenizer = train_tokenizer(iter(text.encode().splitlines()), 400)
    (tmp_path / "other.model").write_bytes(tokenizer)
    if not known:
        for file in run.glob("tokenizer*"):
            file.unlink()
    for command in (["export"], ["generate", "--prompt", "a"], ["eval", "--corpus", __file__]):
        done = CliRunner().invoke(
            app, [command[0], str(run), *command[1:], "--tokenizer", str(tmp_path / "other.model")]
        )
        assert "400 tokens" in str(done.exception)
        assert "its tokens would stand for other text" in str(done.exception)
    assert not (run / "export").exists()
    assert export(run, "--tokenizer", "bytes").exit_code == 0
