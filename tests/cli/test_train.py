"""`skipless train` from the outside: what a user sees who stops it."""

import signal
import time
from pathlib import Path

import pytest
from tests.processes import Program
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes


def training(folder: Path, *more: str) -> Program:
    """A run that would take long, in folder/run."""
    text = folder / "text.txt"
    text.write_text(Path(__file__).read_text() * 40)
    prepare(Preparation(str(text), tokenizer=Bytes(), valid_fraction=0.0), folder / "data", workers=1)
    fields = ("model.vocab_size=256", "model.width=32", "model.heads=4", "model.depth=6", "train.length=32", *more)
    fields += ("train.precision=fp32", "train.compile=false", "train.log_every=1", "train.eval_every=0")
    words = [word for field in fields for word in ("--set", field)]
    code = "from skipless.cli import main; print('ready', flush=True); main()"
    arguments = ["train", "wikitext103/e-spa", "--data", folder / "data", "--out", folder / "run", "--device", "cpu"]
    return Program(code, *arguments, *words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_say_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    process, log = training(tmp_path), tmp_path / "run" / "metrics.jsonl"
    while not (log.is_file() and log.read_text()):
        assert process.poll() is None, process.outputs()
        time.sleep(0.05)
    process.signal(number)
    assert process.wait(60) == 130
    complaint = process.outputs()[1]
    assert complaint.splitlines()[-1].startswith("skipless: stopped after step")
    assert "--resume" in complaint.splitlines()[-1]
    assert "Traceback" not in complaint


@pytest.mark.catalogue(4)
@pytest.mark.parametrize("moment", range(20))
def test_sigterm_before_the_first_step_is_heard(tmp_path: Path, moment: int) -> None:
    """At moments over the two seconds or so that importing, solving and building take."""
    process = training(tmp_path, "model.depth=60")
    while "ready" not in process.outputs()[0]:
        assert process.poll() is None, process.outputs()
        time.sleep(0.005)
    time.sleep(0.01 + 0.1 * moment)
    process.signal(signal.SIGTERM)
    assert process.wait(60) == 130
    complaint = process.outputs()[1]
    assert complaint.splitlines()[-1].startswith("skipless: stopped")
    assert "Traceback" not in complaint


def test_a_corpus_of_the_hub_is_to_be_prepared_first() -> None:
    result = CliRunner().invoke(app, ["train", "wikitext103/e-spa"])
    folder = Path("data") / "wikitext-103-32000"
    prepare = f"`skipless prepare wikitext-103 --download --vocab 32000 --out {folder}`, then --data {folder}"
    assert prepare in str(result.exception)
