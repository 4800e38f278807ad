"""Images from the outside: prepare, train, resume, evaluate; what is for text alone says so."""

import json
from pathlib import Path

import pytest
from tests.pictures import striped
from typer.testing import CliRunner

from skipless.cli.app import app

SIZES = (
    "model.depth=2",
    "model.width=16",
    "model.heads=2",
    "train.steps=6",
    "train.batch_size=4",
    "train.eval_every=3",
)
PLAIN = ("train.precision=fp32", "train.compile=false", "train.log_every=1", "train.checkpoint_every=3")


def skipless(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    striped(tmp_path / "pictures", train=6, test=4)
    return tmp_path


def test_from_pictures_to_a_trained_network(here: Path, one_thread) -> None:
    prepared = skipless("prepare", "pictures", "--images")
    assert (prepared.exit_code, prepared.stdout) == (0, "data/pictures-images\n")
    settings = [word for field in (*SIZES, *PLAIN) for word in ("--set", field)]
    words = ["train", "vit/mirrored", "--data", "data/pictures-images", "--out", "run", "--device", "cpu", *settings]
    shown = json.loads(skipless(*words, "--show").stdout)
    assert (shown["model"]["classes"], shown["model"]["images"]["side"], shown["train"]["length"]) == (2, 16, 16)
    trained = skipless(*words)
    assert trained.exit_code == 0, trained.output
    assert "of 8 images" in trained.stdout
    assert "images/s" in trained.output
    finished = skipless(*words, "--resume")
    assert isinstance(finished.exception, ValueError)
    assert "is finished" in str(finished.exception)
    judged = skipless("eval", "run", "--device", "cpu")
    assert judged.exit_code == 0, judged.output
    assert judged.stdout.splitlines()[-1].startswith("data/pictures-images: validation loss ")
    accuracy = json.loads((here / "run" / "finished.json").read_text())["valid"]["accuracy"]
    assert f"accuracy {accuracy:.2%} of 8 images" in judged.stdout
    for more in ([], ["--corpus", "data/pictures-images"]):
        looked = skipless("inspect", "run", *more)
        assert looked.exit_code == 0, looked.output
        assert "all 2 blocks" in " ".join(looked.output.split())
    for command in (["generate", "run", "--prompt", "x"], ["export", "run"]):
        refused = skipless(*command)
        assert isinstance(refused.exception, ValueError), command
        assert "run holds a network of images, and this is for text" in str(refused.exception)
    other = skipless("eval", "run", "--tasks", "all")
    assert "--tasks is not for a network of images" in str(other.exception)


def test_the_list_has_the_family_and_its_table(here: Path) -> None:
    assert "vit/mirrored-u-spa" in skipless("train", "--list").stdout.splitlines()
    line = next(line for line in skipless("reproduce", "--list").stdout.splitlines() if line.startswith("vision"))
    assert "52" in line


def test_theory_and_inspection_of_the_family(here: Path) -> None:
    certified = skipless("kernels", "vit/mirrored", "--no-figure")
    assert certified.exit_code == 0, certified.output
    assert "survives all 12 blocks" in certified.output
    looked = skipless("inspect", "vit/mirrored", "--depth", "3", "--width", "64")
    assert looked.exit_code == 0, looked.output
    assert "theory" in looked.output
    for option in (["--length", "16"], ["--text", str(here / "pictures" / "train" / "along" / "000.png")]):
        refused = skipless("inspect", "vit/mirrored", *option)
        assert "is a network of images, which have one size" in str(refused.exception)
