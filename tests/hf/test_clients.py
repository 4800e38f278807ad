"""Other people's tools on our models, each held to the native network's numbers. docs/inference.md lists them.

Tools that are not installed are skipped; `.ci/clients` installs them all.
"""

import copy
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.hf.conftest import build
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, DataCollatorWithFlattening, StaticCache
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.hf.modeling import SkiplessForCausalLM, as_pretrained
from skipless.hf.tokenizer import byte_tokenizer
from skipless.model.generate import generate
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.training.checkpoint import save_weights
from skipless.training.config import DataConfig, Experiment, TrainConfig


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; .ci/clients installs it")


@pytest.fixture
def masked(tokens) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    return mask


@pytest.fixture
def of_bytes() -> Transformer:
    """A native model of bytes, in float64, where two ways to one number agree in every choice of a token."""
    return build(vocab_size=256, length=128).double()


@pytest.fixture
def exported(of_bytes, tmp_path) -> Path:
    """What the command `skipless export` writes of a run with its weights, which float32 holds without rounding."""
    run = tmp_path / "run"
    save_weights(copy.deepcopy(of_bytes).float(), run / "model.safetensors")
    byte_tokenizer().save_pretrained(run)
    experiment = Experiment("bytes", of_bytes.config, DataConfig(folder="gone"), train=TrainConfig(steps=9, warmup=1))
    (run / "experiment.json").write_text(experiment.to_json())
    done = CliRunner().invoke(app, ["export", str(run)])
    assert done.exit_code == 0, done.output
    return run / "export"


@pytest.fixture
def folder(of_bytes, tmp_path) -> Path:
    """The same in float64, by the functions that it calls."""
    from skipless.data.tokenizer import ByteTokenizer

    for part in as_pretrained(of_bytes, ByteTokenizer()):
        part.save_pretrained(tmp_path / "export")
    return tmp_path / "export"


def test_the_table_names_tests_that_exist():
    here = Path(__file__).parent
    named = set(re.findall(r"`(test_\w+)`", (here.parents[1] / "docs" / "inference.md").read_text()))
    assert len(named) > 20
    assert named <= set(re.findall(r"^def (test_\w+)", "".join(file.read_text() for file in here.glob("*.py")), re.M))


# --- torch ---


def compiled_as_one_graph(case: str, backend: str, tokens: Tensor, mask: Tensor) -> None:
    """Nothing has run before: shapes are there when the forward is traced."""
    native = build(case)
    expected = native(tokens), native(tokens, layout=Layout.left_padded(mask))
    wrapped = SkiplessForCausalLM.from_native(build(case))
    torch.compiler.reset()
    compiled = torch.compile(wrapped, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tokens).logits, expected[0])
    torch.testing.assert_close(compiled(tokens, attention_mask=mask).logits, expected[1])


@torch.no_grad()
@pytest.mark.catalogue(1)
@pytest.mark.parametrize("case", ["e-spa", "u-spa-relative"])
def test_a_cold_model_compiles_as_one_graph(case, tokens, masked):
    compiled_as_one_graph(case, "aot_eager", tokens, masked)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++, and there is no g++")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # which torch itself calls
def test_inductor_compiles_a_cold_model(tokens, masked, tmp_path, monkeypatch, full):
    if not full:
        pytest.skip("40 seconds of a C++ compiler: with --full")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled_as_one_graph("e-spa", "inductor", tokens, masked)


@torch.no_grad()
@pytest.mark.catalogue(2)
@pytest.mark.parametrize("case", ["e-spa", "u-spa-relative", "v-skipinit", "mirrored"])
def test_an_exported_program_takes_any_length_and_padding(case, tokens, masked):
    native = build(case)
    wrapped = SkiplessForCausalLM.from_native(build(case))
    sizes = {0: torch.export.Dim("rows", min=2, max=64), 1: torch.export.Dim("length", min=2, max=512)}
    program = torch.export.export(
        wrapped,
        (),
        {"input_ids": tokens, "attention_mask": masked, "use_cache": False},
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes, "use_cache": None},
    ).module()
    for rows, length in ((3, 20), (2, 7), (5, 41)):
        others = torch.randint(0, 60, (rows, length))
        mask = torch.ones_like(others)
        mask[1, :3] = 0
        logits = program(input_ids=others, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, native(others, layout=Layout.left_padded(mask)))


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_torch_quantises_linear_layers(native, tokens):
    """Quantised layers have no parameters, and the rest of the network does not ask for any."""
    small, same = (
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        for model in (SkiplessForCausalLM.from_native(native), native)
    )
    assert type(small.model.blocks[0].mlp.inner.up).__module__.startswith("torch.ao")
    hidden = small(tokens, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(hidden, same.hidden(tokens))
    assert nn.functional.cosine_similarity(hidden, native.hidden(tokens), dim=-1).mean() > 0.99


@needs("torchao")
@torch.no_grad()
def test_torchao_quantises_weights_to_int8(native, tokens):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    expected = native(tokens)
    wrapped = SkiplessForCausalLM.from_native(native)
    quantize_(wrapped.model, Int8WeightOnlyConfig())
    logits = wrapped(tokens).logits
    assert 0 < (logits - expected).std() < 0.05 * expected.std()
    assert torch.equal(wrapped.model(tokens), logits)


# --- generate ---


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
        {"assistant": True},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_generate_gives_the_native_tokens(any_native, tokens, options):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    if options.get("assistant"):  # another network proposes tokens
        options = {"assistant_model": SkiplessForCausalLM.from_native(build(depth=2)).double()}
    row = tokens[:1].repeat(1, 2)
    out = wrapped.generate(row, max_new_tokens=12, do_sample=False, **options)
    assert torch.equal(out, generate(any_native, row, 12))


def test_a_cache_of_a_fixed_size_serves_padded_batches(any_native, tokens, masked):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    cache = StaticCache(config=wrapped.config, max_cache_len=40)
    out = wrapped.generate(tokens, attention_mask=masked, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(out, generate(any_native, tokens, 8, attention_mask=masked))


def test_prompts_padded_on_the_right_are_named(wrapped, tokens, caplog):
    mask = torch.ones_like(tokens)
    mask[1, 15:] = 0
    wrapped.generate(tokens, attention_mask=mask, max_new_tokens=2)
    assert "rows [1] end in padding" in caplog.text
    assert "pad on the left" in caplog.text


@torch.no_grad()
def test_a_cropped_cache_goes_on_from_there(any_native, tokens):
    wrapped = SkiplessForCausalLM.from_native(any_native).double()
    cache = wrapped(tokens).past_key_values
    cache.crop(-8)
    torch.testing.assert_close(wrapped(tokens[:, 12:], past_key_values=cache).logits, any_native(tokens)[:, 12:])


# --- transformers ---


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_continues_a_batch_of_texts(of_bytes, folder):
    from transformers import pipeline

    write = pipeline("text-generation", model=str(folder), dtype=torch.float64, batch_size=2)
    texts = ["A longer text", "One"]
    written = write(texts, max_new_tokens=6, do_sample=False, return_tensors=True)
    for text, (found,) in zip(texts, written, strict=True):
        alone = generate(of_bytes, torch.tensor([list(text.encode())]), 6, stop=(255,))[0].tolist()
        assert [token for token in found["generated_token_ids"] if token != 254][: len(alone)] == alone


def test_collators_pad_and_pack(of_bytes):
    tokenizer = byte_tokenizer()
    texts = [tokenizer(text) for text in ("abc", "a longer text")]
    wrapped = SkiplessForCausalLM.from_native(of_bytes)
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)([dict(text) for text in texts])
    packed = DataCollatorWithFlattening()([{"input_ids": text["input_ids"]} for text in texts])
    with torch.no_grad():
        each = [of_bytes(t[:, :-1], t[:, 1:]) for t in (torch.tensor([text["input_ids"]]) for text in texts)]
        mean = ((2 * each[0] + 12 * each[1]) / 14).float()  # in which transformers' loss is
        torch.testing.assert_close(wrapped(**packed).loss, mean)
        logits = of_bytes(padded["input_ids"], layout=Layout.left_padded(padded["attention_mask"]))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), padded["labels"][:, 1:].flatten())
        torch.testing.assert_close(wrapped(**padded).loss, loss)


def trained(model: SkiplessForCausalLM, out: Path, resume: str | None = None, **options) -> dict[str, Tensor]:
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(0, 60, (16, 12), generator=torch.Generator().manual_seed(2))
    settings = {"output_dir": str(out), "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
    settings |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 1, "logging_steps": 1}
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, TrainingArguments(**settings, **options), train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(model.model(rows[:, :-1], rows[:, 1:])), abs=1e-5)
    return {name: value.clone() for name, value in model.state_dict().items()}


@needs("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_trainer_trains_resumes_to_the_bit_and_checkpoints_gradients(tmp_path):
    fresh = lambda: SkiplessForCausalLM.from_native(build())  # noqa: E731
    whole = trained(fresh(), tmp_path)
    assert not torch.equal(whole["model.blocks.0.mlp.inner.up.weight"], fresh().model.blocks[0].mlp.inner.up.weight)
    resumed = trained(fresh(), tmp_path, resume=str(tmp_path / "checkpoint-2"))
    recomputed = trained(fresh(), tmp_path / "again", gradient_checkpointing=True)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
        assert torch.equal(value, recomputed[name]), name


# --- peft ---

TARGETS = ["query", "key", "value", "output", "up", "down"]


@needs("peft")
@pytest.mark.filterwarnings("ignore")
def test_lora_starts_at_the_network_and_merges_into_it(native, tokens, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    expected = native(tokens).detach()
    model = get_peft_model(
        SkiplessForCausalLM.from_native(native), LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM")
    )
    torch.testing.assert_close(model(tokens).logits, expected)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimiser.step()
    after = model(tokens).logits
    assert (after - expected).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(SkiplessForCausalLM.from_native(build()), tmp_path)
    torch.testing.assert_close(again(tokens).logits, after)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged.model(tokens), after, rtol=1e-4, atol=1e-4)  # the native network, alone


@needs("peft")
@pytest.mark.filterwarnings("ignore")
def test_prompt_tuning_puts_its_rows_before_the_text(wrapped, native, tokens):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(wrapped, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    prompt = model.get_prompt(3)
    rows = torch.cat([prompt, native.embedding(tokens)], dim=1)
    torch.testing.assert_close(model(tokens, attention_mask=torch.ones_like(tokens)).logits, native(inputs_embeds=rows))
    model(tokens, labels=tokens).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.prompt_encoder.parameters())
    assert model.generate(input_ids=tokens, max_new_tokens=3).shape == (3, 23)


# --- lm-eval ---


@needs("lm_eval")
@pytest.mark.slow
def test_lm_eval_runs_on_an_export_from_its_command_line(of_bytes, exported, tmp_path):
    """Its perplexity per byte of a text is the native one."""
    text = "The signal that deep networks lose is kept here, from the first block to the last."
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    task = {
        "task": "own_text",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "text.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "own_text.yaml").write_text(json.dumps(task))  # JSON is YAML
    words = ["-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "own_text", "--include_path", tmp_path]
    words += ["--model_args", f"pretrained={exported},trust_remote_code=True,dtype=float64"]
    words += ["--output_path", tmp_path / "out", "--batch_size", "1"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["own_text"]["bits_per_byte,none"]
    tokens = torch.tensor([[255, *text.encode()]])
    with torch.no_grad():
        expected = float(of_bytes(tokens[:, :-1], tokens[:, 1:])) / torch.tensor(2.0).log().item()
    assert found == pytest.approx(expected, abs=1e-5)


@needs("accelerate")
@torch.no_grad()
def test_a_device_map_places_blocks(folder, of_bytes):
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    tokens = torch.tensor([list(b"text")])
    assert torch.equal(loaded(tokens).logits, of_bytes(tokens))
