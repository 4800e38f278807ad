"""A network of a kind of its own by the commands: trained, killed, taken up again and exported."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.processes import Program
from typer.testing import CliRunner

import skipless
from skipless.cli.app import app
from skipless.model.transformer import Transformer


def training_words(data: Path, fields: Sequence[str], *options: str) -> list[str]:
    """The command that trains mirrored/e-spa, with these fields changed, for 16 short steps."""
    fields = (*fields, "model.width=32", "model.depth=3", "train.length=16", "train.precision=fp32",
              "train.compile=false", "train.eval_every=0", "train.steps=16", "train.batch_size=2",
              "train.checkpoint_every=2")  # fmt: skip
    sets = [word for field in fields for word in ("--set", field)]
    return ["train", "mirrored/e-spa", *options, "--data", str(data), "--device", "cpu", *sets]


def kill_at_a_checkpoint(words: Sequence[str], run: Path) -> None:
    """Train into the folder until it has a checkpoint, or the beginning of one."""
    killed = Program("from skipless.cli import main; main()", *words, "--out", run)
    while not any((run / "checkpoints").glob("*/")):
        assert killed.poll() is None, killed.outputs()
        time.sleep(0.02)
    killed.signal(signal.SIGKILL)
    killed.wait(30)


def check_resumed_and_exported(words: Sequence[str], *options: str, continued: int) -> Transformer:
    """What was killed in ./run goes on to the bit, and its export is the same network; that network."""
    for each in ([*words, "--out", "run", "--resume"], [*words, "--out", "whole"], ["export", "run", *options]):
        done = CliRunner().invoke(app, each)
        assert done.exit_code == 0, done.exception
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]
    native, exported = skipless.load("run"), skipless.load("run/export")
    assert native.config == exported.config
    tokens = torch.arange(16)[None]
    assert torch.equal(native(tokens), exported(tokens))
    assert torch.equal(native.generate(tokens[:, :12], continued), exported.generate(tokens[:, :12], continued))
    return native
