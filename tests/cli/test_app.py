"""The application itself: what every command line answers."""

import inspect
import json
import os
import pickle
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import skipless
from skipless.cli.app import COMMANDS, app, run
from skipless.data.tokenizer import ByteTokenizer
from skipless.hf.modeling import as_pretrained
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer


def test_it_says_its_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"skipless {skipless.__version__}\n"


def test_an_unknown_command_is_refused():
    assert CliRunner().invoke(app, ["trian"]).exit_code == 2


def test_an_unknown_command_names_the_nearest():
    assert "'train'" in CliRunner().invoke(app, ["trian"]).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_help_is_the_command_s_own(name):
    """Help is read from the table, so that it imports no command; here the two are held together."""
    function = import_module(f"skipless.cli.{COMMANDS[name].module}").command
    assert (inspect.getdoc(function) or "").partition("\n")[0] == COMMANDS[name].help
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"skipless {name}" in shown.stdout


WRONG_PATHS = {
    "demo": ["demo", "--out", __file__],
    "kernels": ["kernels", "nosuch"],
    "inspect": ["inspect", "nosuch"],
    "inspect --text": ["inspect", "wikitext103/e-spa", "--text", "nosuch.txt"],
    "inspect --corpus": ["inspect", "wikitext103/e-spa", "--corpus", "nosuch"],
    "eval": ["eval", "nosuch"],
    "generate": ["generate", "nosuch", "--prompt", "The"],
    "prepare": ["prepare", "nosuch"],
    "train": ["train", "nosuch"],
    "train a file": ["train", "nosuch.json"],
    "train --data": ["train", "wikitext103/e-spa", "--data", "nosuch"],
    "train --out": ["train", "wikitext103/e-spa", "--out", __file__],
    "train a folder": ["train", "wikitext103/e-spa", "--out", str(Path(__file__).parent)],
    "export": ["export", "nosuch"],
    "report": ["report", "nosuch"],
    "reproduce": ["reproduce", "nosuch"],
    "reproduce --data": ["reproduce", "baselines", "--data", "nosuch"],
}
RUN = """
import json, os, sys
from skipless.cli import main
seen = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv, before = ["skipless", *words], os.times().user
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    heavy = {"torch", "transformers", "matplotlib", "scipy.optimize"} & set(sys.modules)
    seen[name] = [code, sorted(heavy), os.times().user - before]
print("\\n" + json.dumps(seen))
"""


def answers(commands: dict[str, list[str]], folder) -> dict[str, list]:
    """Exit code, slow libraries that are loaded by then and CPU time of commands, one after another in one process."""
    words = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, timeout=120)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lists_and_refusals_of_a_wrong_path_come_at_once(tmp_path):
    """Within a second of CPU time and without what is slow to import; a busy machine may take longer by the clock."""
    listed = {"train --list": ["train", "--list"], "kernels --list": ["kernels", "--list"]}
    for name, (code, heavy, seconds) in answers({**listed, **WRONG_PATHS}, tmp_path).items():
        assert (name, code, heavy) == (name, 0 if "--list" in name else 2, [])
        assert seconds < 1.0, f"{name} took {seconds:.2f} s"


def test_the_paper_s_tables_are_listed_without_torch(tmp_path):
    code, heavy, seconds = answers({"list": ["reproduce", "--list"]}, tmp_path)["list"]
    assert code == 0
    assert "torch" not in heavy
    assert seconds < 2.5


def test_what_only_the_system_has_said_becomes_a_sentence(monkeypatch, capsys):
    def fail(error: OSError) -> str:
        def command() -> None:
            raise error

        monkeypatch.setattr("skipless.cli.app.app", command)
        with pytest.raises(SystemExit) as caught:
            run()
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert fail(OSError(30, "Read-only file system", "runs/new")) == (
        "skipless: runs/new could not be read or written (Read-only file system)\n"
    )
    assert fail(OSError(28, "No space left on device")) == (
        "skipless: the output could not be read or written (No space left on device)\n"
    )
    assert fail(OSError("runs/new is full: make room")) == "skipless: runs/new is full: make room\n"


def test_a_command_without_standard_streams_does_its_work(tmp_path):
    """As a daemon's: 2>&- gives the number of standard error to the next file that is opened."""
    words = [sys.executable, "-m", "skipless", "kernels", "e-spa", "--depth", "4", "--length", "8", "--no-figure"]
    closed = {"preexec_fn": lambda: [os.close(number) for number in (0, 1, 2)]}
    done = subprocess.run([*words, "--json", "found.json"], check=False, cwd=tmp_path, **closed)
    assert done.returncode == 0
    assert json.loads((tmp_path / "found.json").read_text())["name"] == "e-spa"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as save_pretrained writes it, with bytes for tokens."""
    folder = tmp_path / "model"
    native = Transformer(ModelConfig(vocab_size=259, width=16, depth=1, heads=2, length=16, activation="gelu"))
    for part in as_pretrained(native, ByteTokenizer()):
        part.save_pretrained(folder)
    return folder


def opening(folder: Path) -> list[list[str]]:
    """Every command that opens a model."""
    return [
        ["inspect", str(folder), "--length", "8", "--batch", "1", "--text", __file__],
        ["generate", str(folder), "--prompt", "a", "--max-new-tokens", "2"],
        ["eval", str(folder), "--corpus", __file__, "--max-tokens", "40"],
        ["export", str(folder), "--out", str(folder.parent / "export")],
    ]


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "optimizer.pt"])
def test_nothing_is_unpickled(model: Path, tmp_path: Path, name: str) -> None:
    gone_off = tmp_path / "gone off"
    if name == "pytorch_model.bin":
        (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Bomb(gone_off)))
    codes = [CliRunner().invoke(app, words).exit_code for words in opening(model)]
    assert any(codes) == (name != "optimizer.pt"), "a file that belongs to no model is not looked at"
    probes = tmp_path / "run" / "probes"
    probes.mkdir(parents=True)
    np.savez(probes / "step-000001.npz", step=1, states=np.array([Bomb(gone_off)], dtype=object))
    report = ["report", str(probes.parent), "--out", str(tmp_path / "page.html")]
    assert "step-000001.npz" in str(CliRunner().invoke(app, report).exception)
    assert not gone_off.exists()
    pickle.loads(pickle.dumps(Bomb(gone_off)))
    assert gone_off.exists(), "it would have"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_model_is_not_run(model: Path, tmp_path: Path, file: str) -> None:
    """Nor is anybody asked: a "y" that waits on standard input changes nothing."""
    (model / "evil.py").write_text(f"open({str(tmp_path / 'gone off')!r}, 'w')\n")
    settings = json.loads((model / file).read_text())
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoModel") if file == "config.json" else ("AutoTokenizer",)
    code = {kind: ["evil.Evil", "evil.Evil"] if kind == "AutoTokenizer" else "evil.Evil" for kind in kinds}
    for other in ("skipless", "unknown"):  # a kind of model that transformers knows, and one that it does not
        changed = settings | {"auto_map": code} | ({"model_type": other} if file == "config.json" else {})
        (model / file).write_text(json.dumps(changed))
        for words in opening(model):
            CliRunner().invoke(app, words, input="y\n" * 9)
            assert not (tmp_path / "gone off").exists(), words


def test_no_command_uses_the_network(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for place, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(place, name, lambda *arguments: asked.append(arguments))
    monkeypatch.chdir(tmp_path)
    kernels = ["kernels", "e-spa", "--depth", "4", "--length", "16", "--json", "a.json", "--no-figure"]
    more = [kernels, ["report", "a.json"], ["prepare", __file__, "--bytes"], ["train", "--list"]]
    for words in (*opening(model)[:3], *more):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.exception)
    for corpus in ("wikitext-103", "c4"):
        assert "--download" in str(CliRunner().invoke(app, ["prepare", corpus]).exception)
    assert not asked
