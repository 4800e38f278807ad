import json
import re

import pytest
import torch
import typer
from typer.testing import CliRunner

from skipless.cli import inspect as cli
from skipless.cli.inspect import InspectArguments, rows_of
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.hf.modeling import SkiplessForCausalLM
from skipless.hf.tokenizer import byte_tokenizer
from skipless.inspection.load import build_family
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer

SMALL = ("--width", "32", "--heads", "4", "--length", "24")


def invoke(*arguments: str, **env: str):
    app = typer.Typer()
    app.command()(cli.command)
    return CliRunner().invoke(app, list(arguments), env=env)


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


def test_rounding_is_shown_by_block_where_it_is_asked_for(tmp_path):
    data = tmp_path / "out.json"
    result = invoke("wikitext103/e-spa", *SMALL, "--rounding", "bf16", "--json", str(data))
    assert result.exit_code == 0, result.output
    shares = [block["rounding"] for block in json.loads(data.read_text())["blocks"]]
    assert shares[0] == 0.0
    assert shares[-1] > shares[5] > 0.0
    assert f"In bf16 rounding adds {shares[-1]:.3g} of what tells locations apart" in result.output
    head = next(line for line in result.output.splitlines() if "kurtosis" in line)
    assert "rounding" in head
    assert any(line.startswith("rounding ▁") for line in result.output.splitlines())
    without = invoke("wikitext103/e-spa", *SMALL)
    assert "rounding" not in without.output


def test_short_names_of_presets_are_those_of_train():
    result = invoke("mirrored", "--depth", "2", "--width", "32", "--heads", "2", "--length", "16")
    assert result.exit_code == 0
    assert "mirrored: The signal survives all 2 blocks" in result.output


@pytest.mark.parametrize("width", [80, 200])
def test_a_narrow_terminal_gets_whole_numbers_in_further_tables(width):
    result = invoke("wikitext103/e-spa", *SMALL, FORCE_COLOR="1", COLUMNS=str(width))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output).partition("cosine   ▁")[0]  # what precedes the strips
    assert "…" not in plain
    assert all(title in plain for title in ("gradient²", "kurtosis", "theory: norm²", "theory: cosine"))
    assert len(re.findall(r"^ *block  ", plain, flags=re.M)) == (2 if width == 80 else 1)


def test_a_family_is_built_and_healthy():
    result = invoke("hf:gpt2", "--depth", "3", *SMALL, "--check")
    assert result.exit_code == 0, result.output
    assert "hf:gpt2: The signal survives all 3 blocks" in result.output


def test_images_are_noise():
    result = invoke("hf:vit", "--depth", "2", "--width", "16", "--heads", "2", "--batch", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["blocks"]) == 3


def test_a_saved_model_reads_a_text(tmp_path):
    saved(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 10)
    result = invoke(str(tmp_path / "model"), "--text", str(text), "--length", "32")
    assert result.exit_code == 0, result.output
    short = invoke(str(tmp_path / "model"), "--text", str(text), "--length", "5000")
    assert "holds 440 tokens" in str(short.exception)


def saved(folder, vocabulary: int = 256, tokenizer: bool = True):
    torch.manual_seed(0)
    sizes = {"width": 32, "depth": 6, "heads": 4, "length": 16, "activation": "gelu"}
    SkiplessForCausalLM.from_native(Transformer(ModelConfig(vocab_size=vocabulary, **sizes))).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_weights_cut_short_are_named(tmp_path, size):
    weights = tmp_path / "model.safetensors"
    saved(tmp_path, tokenizer=False)
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, cut short"):
        batch_of(model=str(tmp_path))


@pytest.mark.parametrize(("field", "value"), [("n_embd", 32), ("n_head", 3)])
def test_weights_of_another_configuration_are_named(tmp_path, field, value):
    build_family("gpt2", num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=50).save_pretrained(
        tmp_path
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=r"does not load .* not those of its config\.json"):
        batch_of(model=str(tmp_path))


def batch_of(**typed) -> torch.Tensor:
    asked = InspectArguments(**{"length": 16, "rows": 2, **typed})
    asked.check()
    return asked.batch(*asked.open())


def test_a_corpus_is_read_with_the_models_own_tokenizer(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox")
    (tmp_path / "text" / "b.txt").write_text("jumps over the lazy dog, and over the fence")
    got = batch_of(model=saved(tmp_path / "model"), corpus=str(tmp_path / "text"))
    assert bytes(got.flatten().tolist()) == b"the quick brown foxjumps over the lazy dog"[:32]
    result = invoke(saved(tmp_path / "model"), "--corpus", "stdlib", "--length", "32")
    assert result.exit_code == 0, result.output


def test_a_family_reads_a_corpus_as_bytes():
    family = batch_of(model="hf:gpt2", corpus="stdlib", sizes={"depth": 1, "width": 16, "heads": 2})
    assert family.shape == (2, 16)
    assert family.max() < 256  # bytes: a family has no tokenizer


def test_a_prepared_folder_is_read_as_it_is(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 9)
    plan = Preparation(str(tmp_path / "text.txt"), tokenizer=Bytes(), valid_fraction=0.0)
    prepare(plan, tmp_path / "tokens", workers=1)
    got = batch_of(model=saved(tmp_path / "model"), corpus=str(tmp_path / "tokens"))
    assert bytes(got[0].tolist()) == b"the quick brown "
    named = batch_of(
        model=saved(tmp_path / "bare", tokenizer=False),
        corpus=str(tmp_path / "text.txt"),
        tokenizer=str(tmp_path / "tokens"),
    )
    assert torch.equal(named, got)
    with pytest.raises(ValueError, match="prepared with 256 tokens and the model knows 97"):
        batch_of(model=saved(tmp_path / "small", 97), corpus=str(tmp_path / "tokens"))


def test_a_limit_below_one_is_none():
    family = batch_of(model="hf:xlnet", sizes={"depth": 1, "width": 16, "heads": 2})
    assert family.shape == (2, 16)


@pytest.mark.parametrize(
    ("tokens", "fit"),
    [(20, ", or --batch 1"), (10, ", or --length 5"), (3, ", or --batch 1 --length 3"), (1, ""), (0, "")],
)
def test_the_shape_named_for_a_short_text_fits_it(tokens, fit):
    with pytest.raises(ValueError, match=f"use a longer text{fit}$"):
        rows_of(iter([range(tokens)]), (2, 16), 256, "text")
    if fit:
        words = fit.removeprefix(", or ").split()
        named = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        shape = (named.get("--batch", 2), named.get("--length", 16))
        assert rows_of(iter([range(tokens)]), shape, 256, "text").shape == shape


def test_an_output_overwrites_neither_the_text_nor_another_output(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 10)
    for typed, message in [
        (("--text", str(text), "--json", str(text)), "which is read too"),
        (("--corpus", str(text), "--json", str(text)), "which is read too"),
        (("--json", str(tmp_path / "x.png"), "--figure", str(tmp_path / "x.png")), "which --json writes too"),
    ]:
        result = invoke("wikitext103/e-spa", *SMALL, *typed)
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == [text]


def test_what_a_text_can_have_wrong_with_it(tmp_path):
    model = saved(tmp_path / "model")
    for typed, message in [
        ({"corpus": "nosuch"}, "no corpus 'nosuch'.*stdlib"),
        ({"text": tmp_path / "nosuch"}, "which is no file"),
        ({"text": tmp_path / "binary.txt"}, "not UTF-8 text"),
        ({"corpus": "stdlib", "text": tmp_path / "x.txt"}, "both given"),
        ({"tokenizer": "bytes"}, "no text is read"),
        ({"corpus": str(tmp_path / "short.txt")}, "holds 20 tokens; 2 rows of 16 need 32: .* --batch 1"),
        ({"corpus": "stdlib", "model": saved(tmp_path / "bare", tokenizer=False)}, "holds no tokenizer"),
        ({"corpus": "stdlib", "model": saved(tmp_path / "small", 97)}, "has token .* but the model knows 97"),
        (
            {"corpus": "stdlib", "model": saved(tmp_path / "small", 97), "tokenizer": "bytes"},
            "has 256 tokens and the model knows 97",
        ),
        ({"corpus": "stdlib", "model": "hf:vit"}, "reads images"),
    ]:
        (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "short.txt").write_text("twenty characters ok")
        with pytest.raises(ValueError, match=message):
            batch_of(**{"model": model, **typed})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch/model",), "is no folder, no preset"),
        (("miror",), "no preset (nearest: mirrored)"),
        (("pre-lm",), "no preset (nearest: pre-ln"),
        (("hf:gtp2",), "knows no family"),
        (
            ("hf:llama", "--depth", "2", "--width", "100"),
            "a multiple of the number of attention heads (32); use --width 128",
        ),
        (("hf:llama", "--width", "64", "--heads", "7"), "hf:llama --width 64 --heads 7 cannot be built"),
        (("hf:llama", "--depth", "2", "--width", "36", "--heads", "4"), "RoPE requires an even rotary dimension"),
        (("hf:gpt2", "--width", "100"), "use --width 96"),
        (("hf:gpt2", "--heads", "0"), "--heads is 0; give at least 1"),
        (("hf:llama", "--width", "-64"), "--width is -64; give at least 1"),
        (("hf:gpt2", "--depth", "0"), "--depth is 0; give at least 1"),
        (("hf:llama", "--width", "131072"), "hf:llama --width 131072 takes at least 35,2"),
        (("wikitext103/e-spa", "--depth", "99", "--width", "131072"), "make it smaller, e.g. with --width 256"),
        (("hf:clip",), "hf:clip reads neither tokens nor images of a size that its config names"),
        (
            ("hf:wav2vec2", "--depth", "1", "--width", "16", "--heads", "2"),
            "hf:wav2vec2 reads neither tokens nor images",
        ),
        (("hf:gpt2", "--length", "1"), "at least 2"),
        (("hf:gpt2", "--length", "5000", "--depth", "2", "--width", "16", "--heads", "2"), "has 1024 positions"),
        (
            ("hf:vit", "--length", "5000", "--depth", "1", "--width", "16", "--heads", "2"),
            "--length is 5000, but hf:vit reads images",
        ),
        (("wikitext103/e-spa", "--figure", "x.bmp"), "must end in"),
        (("wikitext103/e-spa", "--device", "gpu"), "torch does not know; use cpu, cuda"),
        (("wikitext103/e-spa", "--device", "cuda:97"), "'cuda:97', but torch sees"),
        (("wikitext103/e-spa", "--device", "meta"), "'meta', on which torch cannot compute here"),
        (("wikitext103/e-spa", "--device", "vulkan"), "'vulkan', on which torch cannot compute here"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
