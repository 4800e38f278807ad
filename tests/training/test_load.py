import copy
import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.data.loader import TokenLoader
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes, ByteTokenizer
from skipless.model.config import ModelConfig
from skipless.model.generate import Sampling, generate
from skipless.model.quantise import quantised
from skipless.model.transformer import Transformer
from skipless.training.checkpoint import save_checkpoint, save_weights
from skipless.training.config import DataConfig, Experiment, TrainConfig
from skipless.training.distributed import join_world
from skipless.training.evaluate import Windowing, evaluate_loss, evaluate_text, held_out_texts
from skipless.training.load import find_tokenizer, load, load_model
from skipless.training.run import read_experiment

TEXT = "\n\n\n".join(f"Article {n}\nThe naïve cat no. {n} sat on {'the mat, and ' * n}slept." for n in range(12))


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocab_size=256, width=32, depth=2, heads=4, length=16, activation="gelu")).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    prepare(Preparation(str(place / "text.txt"), Bytes(), valid_fraction=0.5), place / "prepared", workers=1)
    return place / "prepared"


@pytest.fixture
def run(tmp_path, model, folder):
    """A run folder as `skipless train` leaves it."""
    train = TrainConfig(steps=9, warmup=1, length=16)
    experiment = Experiment("tiny", model.config, DataConfig(folder=str(folder)), train=train)
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    save_weights(model, tmp_path / "model.safetensors")
    return tmp_path


def test_the_command_prints_a_run_s_validation_loss(run, model, folder):
    result = CliRunner().invoke(app, ["eval", str(run), "--device", "cpu", "--json", str(run / "out" / "eval.json")])
    assert result.exit_code == 0, result.output
    expected = evaluate_loss(model, TokenLoader(TokenStore(folder, "valid"), 16, 8))
    assert f"{expected.loss:.4f}" in result.stdout
    record = json.loads((run / "out" / "eval.json").read_text())
    assert record["texts"][str(folder)]["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert record["weights"].endswith("model.safetensors")


def test_a_run_is_evaluated_with_rounded_matrices(run, model, folder):
    arguments = ["eval", str(run), "--device", "cpu", "--json", "-"]
    losses = {}
    for name in ("int8", "int4-weights-tensor"):
        result = CliRunner().invoke(app, [*arguments, "--quantise", name])
        record = json.loads(result.stdout)
        assert (record["options"]["quantise"], record["options"]["precision"]) == (name, "fp32")
        with quantised(model.blocks, name):
            expected = evaluate_loss(model, TokenLoader(TokenStore(folder, "valid"), 16, 8)).loss
        losses[name] = record["texts"][str(folder)]["loss"]
        assert losses[name] == pytest.approx(expected, rel=1e-6)
    plain = evaluate_loss(model, TokenLoader(TokenStore(folder, "valid"), 16, 8)).loss
    assert abs(losses["int8"] - plain) < abs(losses["int4-weights-tensor"] - plain)


def test_a_run_is_evaluated_as_it_validated(run, model, folder):
    experiment = read_experiment(run).override("train.length=12", "data.packed=true")
    (run / "experiment.json").write_text(experiment.to_json())
    result = CliRunner().invoke(app, ["eval", str(run), "--device", "cpu", "--json", "-"])
    (values,) = json.loads(result.stdout)["texts"].values()
    joined, packed = (
        evaluate_loss(model, TokenLoader(TokenStore(folder, "valid"), 12, 8, documents=own)).loss
        for own in (False, True)
    )
    assert values["loss"] == pytest.approx(packed, rel=1e-6) != pytest.approx(joined, rel=1e-6)


def test_text_too_is_read_as_the_run_was_trained(run, model, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT, encoding="utf-8")
    arguments = ["eval", str(run), "--corpus", str(tmp_path / "other.txt"), "--device", "cpu", "--json", "-"]
    for packed in (False, True):
        experiment = read_experiment(run).override(f"data.packed={str(packed).lower()}")
        (run / "experiment.json").write_text(experiment.to_json())
        result = CliRunner().invoke(app, arguments)
        assert ("within documents" in result.stderr) == packed
        (values,) = json.loads(result.stdout)["texts"].values()
        documents = list(held_out_texts(tmp_path / "other.txt"))
        assert len(documents) > 1
        expected = evaluate_text(model, ByteTokenizer(), documents, Windowing(16, packed=packed))
        assert values["loss"] == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--length", "0"], "--length is 0; it must be at least 1"),
        (["--tasks-folder", "."], "add --tasks all"),
        (["--quantise", "int9"], "no quantisation 'int9'; did you mean 'int8'"),
        (["--quantise", "int8", "--backend", "lm-eval"], "--quantise is for the built-in scorer"),
    ],
)
def test_options_that_would_be_ignored_are_refused(run, options, complaint):
    result = CliRunner().invoke(app, ["eval", str(run), "--device", "cpu", *options])
    assert isinstance(result.exception, ValueError)
    assert complaint in str(result.exception)


def test_the_command_reads_any_text_and_writes_json(run, tmp_path):
    (tmp_path / "other.txt").write_text("Some other text.", encoding="utf-8")
    arguments = ["eval", str(run), "--corpus", str(tmp_path / "other.txt"), "--separate", "--json", "-"]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (values,) = json.loads(result.stdout)["texts"].values()
    assert (values["tokens"], values["bytes"]) == (17, 16)


def test_a_saved_model_is_read_with_its_tokenizer(model, tmp_path):
    from skipless.hf.modeling import SkiplessForCausalLM
    from skipless.hf.tokenizer import byte_tokenizer

    SkiplessForCausalLM.from_native(model).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    subject = load_model(tmp_path)
    expected = evaluate_text(model, ByteTokenizer(), [TEXT], Windowing(16))
    assert evaluate_text(subject.model, subject.tokenizer, [TEXT], Windowing(16)) == expected


def test_what_a_folder_lacks_is_said(run, tmp_path, model):
    lost = Experiment("lost", model.config, DataConfig(folder="gone"), train=TrainConfig(steps=9, warmup=1))
    (run / "experiment.json").write_text(lost.to_json())
    with pytest.raises(ValueError, match=r"tokenizer of .* is not found: its data folder is 'gone'"):
        load_model(run)
    assert load_model(run, "bytes").validation is None
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights, neither"):
        load_model(run, "bytes")
    save_checkpoint(run / "checkpoints", 7, model, None, {}, keep=1)
    subject = load_model(run, "bytes")
    assert subject.origin.endswith("step 7")
    assert torch.equal(subject.model.embedding.weight, model.embedding.weight)


def test_a_path_that_holds_no_model_is_explained(run, folder, tmp_path):
    (tmp_path / "runs" / "e-spa").mkdir(parents=True)
    (tmp_path / "runs" / "e-spa" / "experiment.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for path, complaint in (
        (tmp_path / "runs" / "e-sap", "does not exist; did you mean .*e-spa"),
        (tmp_path / "no" / "where", "does not exist; give a run's folder, .*working folder"),
        (run / "model.safetensors", f"is a file; did you mean its folder, {run}"),
        (folder, "holds prepared data and no model"),
        (tmp_path / "runs", r"is a folder of runs; name one of them: .*e-spa$"),
        (tmp_path / "empty", r"neither a run \(no experiment\.json\) nor a saved model"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load(path)


def test_a_loaded_model_writes_text(run, model):
    loaded = load(run)
    assert not loaded.training
    text = loaded.generate("Once", 9)
    tokens = torch.tensor([list(b"Once")])
    assert text == ByteTokenizer().decode(generate(model, tokens, 9, stop=(0xFF,))[0].tolist())
    assert torch.equal(loaded.generate(tokens, 9), generate(model, tokens, 9))
    assert loaded.generate("Once", 9, sampling=Sampling(1.0), seed=3) == load(run).generate(
        "Once", 9, sampling=Sampling(1.0), seed=3
    )
    with pytest.raises(ValueError, match="the prompt is empty"):
        loaded.generate("")
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        model.generate("Once")


def test_an_export_never_stands_in_for_newer_weights(run, model):
    (run / "model.safetensors").unlink()
    save_checkpoint(run / "checkpoints", 31, model, None, {}, keep=2)
    assert CliRunner().invoke(app, ["export", str(run)]).exit_code == 0
    newer = copy.deepcopy(model)
    with torch.no_grad():
        newer.embedding.weight.add_(1.0)
    save_checkpoint(run / "checkpoints", 101, newer, None, {}, keep=2)
    subject = load_model(run)
    assert subject.origin.endswith("step 101")
    assert torch.equal(subject.model.embedding.weight, newer.embedding.weight)
    assert torch.equal(load(run / "checkpoints" / "step-000031").embedding.weight, model.embedding.weight)
    weights = run / "export" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert CliRunner().invoke(app, ["export", str(run), "--force"]).exit_code == 0
    assert torch.equal(load_model(run / "export").model.embedding.weight, newer.embedding.weight)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match=r"or name its export, .*export$"):
        load_model(run)


@pytest.mark.parametrize(
    ("device", "complaint"), [("cuda:99", "but torch sees"), ("foo", "does not know"), ("meta", "cannot compute here")]
)
def test_a_device_that_is_not_there_is_refused(run, device, complaint):
    for words in (["eval"], ["generate", "--prompt", "a"]):
        result = CliRunner().invoke(app, [*words, str(run), "--device", device])
        assert isinstance(result.exception, ValueError)
        assert complaint in str(result.exception)
    with pytest.raises(ValueError, match=complaint), join_world(device):
        pass


def test_text_ends_where_a_document_does(run, model):
    from transformers import AutoModelForCausalLM

    ending = copy.deepcopy(model)
    prompt = torch.tensor([list(b"Once")])
    with torch.no_grad():
        ending.embedding.weight[0xFF] = 100.0 * ending.hidden(prompt)[0, -1]  # the end is what follows the prompt
    save_weights(ending, run / "model.safetensors")
    assert CliRunner().invoke(app, ["export", str(run)]).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(run / "export")
    assert (loaded.config.eos_token_id, loaded.generation_config.eos_token_id) == (0xFF, 0xFF)
    assert loaded.generate(prompt, max_new_tokens=9, do_sample=False)[0].tolist() == [*b"Once", 0xFF]
    for place in (run, run / "export"):
        result = CliRunner().invoke(app, ["generate", str(place), "--prompt", "Once", "--temperature", "0"])
        assert result.stdout == "Once\n", result.output


def test_a_run_s_own_tokenizer_file_is_found(run, shared_data):
    model_file = (shared_data / "tokenizer" / "wiki32k.model").read_bytes()
    (run / "tokenizer.model").write_bytes(model_file)
    assert find_tokenizer(run).model == model_file
    with pytest.raises(ValueError, match=r"tokenizer \(sentencepiece, 32,000 tokens.* a model of 256 tokens"):
        load_model(run)
