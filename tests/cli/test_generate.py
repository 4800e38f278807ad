import io
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from skipless.cli import generate as cli
from skipless.data.tokenizer import ByteTokenizer
from skipless.hf.modeling import SkiplessForCausalLM
from skipless.hf.tokenizer import byte_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.generate import generate
from skipless.model.transformer import Transformer
from skipless.training.load import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    native = Transformer(ModelConfig(vocab_size=256, width=32, depth=3, heads=4, length=16, activation="gelu"))
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    place = tmp_path_factory.mktemp("model")
    SkiplessForCausalLM.from_native(native).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def invoke(*arguments: str, **options):
    app = typer.Typer()
    app.command()(cli.command)
    return CliRunner().invoke(app, list(arguments), **options)


def expected(folder, prompt: str, count: int) -> str:
    loaded = load_model(folder)
    tokens = torch.tensor([loaded.tokenizer.encode(prompt).tolist()])
    return loaded.tokenizer.decode(generate(loaded.model, tokens, count)[0].tolist())


def test_it_writes_the_prompt_and_its_continuation(folder):
    result = invoke(str(folder), "--prompt", "Once", "--max-new-tokens", "30", "--temperature", "0", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(folder, "Once", 30) + "\n"


def test_the_prompt_may_come_by_pipe_and_stay_unwritten(folder):
    options = ("--max-new-tokens", "9", "--temperature", "0", "--device", "cpu", "--no-echo")
    result = invoke(str(folder), *options, input="Once")
    assert "Once" + result.stdout == expected(folder, "Once", 9) + "\n"


def test_a_seed_repeats(folder):
    options = (str(folder), "--prompt", "a", "--seed", "4", "--top-k", "20", "--top-p", "0.9", "--device", "cpu")
    assert invoke(*options).stdout == invoke(*options).stdout


def test_text_comes_piece_by_piece_and_characters_are_never_cut():
    tokenizer = ByteTokenizer()
    text = "né 日本 🎉!"
    pieces = list(cli.text_of(tokenizer, list(b"abc"), iter(text.encode())))
    assert pieces == list(text)
    assert "".join(cli.text_of(tokenizer, list(b"abc"), iter("日".encode()[:2]))) == "\N{REPLACEMENT CHARACTER}"


def test_ctrl_c_ends_the_line(monkeypatch):
    def interrupted():
        yield "some"
        raise KeyboardInterrupt

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(typer.Exit) as end:
        cli._write(interrupted(), "a prompt: ")
    assert (out.getvalue(), end.value.exit_code) == ("a prompt: some\n", 130)


def test_a_reader_that_leaves_early_is_no_error():
    script = 'from skipless.cli import generate; generate._write(("x" * 100 for _ in range(100_000)), "Once")'
    shell = f"set -o pipefail; '{sys.executable}' -c '{script}' | head -c 4"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=120)
    assert (result.stdout, result.returncode) == (b"Once", 0), result.stderr.decode()


def test_a_folder_without_a_model_is_named(tmp_path):
    result = invoke(str(tmp_path), "--prompt", "Once")
    assert isinstance(result.exception, ValueError)
    assert "neither a run (no experiment.json) nor a saved model (no config.json)" in str(result.exception)
