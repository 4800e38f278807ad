import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from skipless.cli import inspect as cli
from skipless.hf import SkiplessForCausalLM, byte_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer

SMALL = ("--width", "32", "--heads", "4", "--length", "24")


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(cli.command)
    return CliRunner().invoke(app, list(arguments))


def test_a_preset_that_collapses_fails_the_check(tmp_path):
    figure, data = tmp_path / "out.png", tmp_path / "out.json"
    result = invoke("wikitext103/skipless", *SMALL, "--check", "--figure", str(figure), "--json", str(data))
    assert result.exit_code == 1, result.output
    assert "Rank collapse at block" in result.output
    assert "E-SPA with γ_L = 0.005" in result.output
    assert "theory: norm²" in result.output
    strip = next(line for line in result.output.splitlines() if line.startswith("cosine "))
    assert strip.count("█") > 20
    assert len(json.loads(data.read_text())["blocks"]) == 37
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_family_is_built_and_healthy():
    result = invoke("hf:gpt2", "--depth", "3", *SMALL, "--check")
    assert result.exit_code == 0, result.output
    assert "hf:gpt2: The signal survives all 3 blocks" in result.output


def test_images_are_noise():
    result = invoke("hf:vit", "--depth", "2", "--width", "16", "--heads", "2", "--batch", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["blocks"]) == 3


def test_a_saved_model_reads_a_text(tmp_path):
    torch.manual_seed(0)
    native = Transformer(ModelConfig(vocab_size=256, width=32, depth=6, heads=4, length=16, activation="gelu"))
    SkiplessForCausalLM.from_native(native).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 10)
    result = invoke(str(tmp_path / "model"), "--text", str(text), "--length", "32")
    assert result.exit_code == 0, result.output
    short = invoke(str(tmp_path / "model"), "--text", str(text), "--length", "5000")
    assert "holds 440 tokens" in str(short.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch/model",), "is no folder, no preset"),
        (("hf:gtp2",), "knows no family"),
        (("hf:gpt2", "--length", "1"), "at least 2"),
        (("hf:gpt2", "--length", "5000", "--depth", "2", "--width", "16", "--heads", "2"), "has 1024 positions"),
        (("wikitext103/e-spa", "--figure", "x.bmp"), "must end in"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
