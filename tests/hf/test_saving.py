import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skipless.hf import SkiplessForCausalLM


@torch.no_grad()
def test_a_round_trip_through_disk_is_exact_and_safe(any_native, tokens, tmp_path):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    wrapped.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == {f"model.{name}" for name in any_native.state_dict()}  # no lm_head, no derived tensor
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SkiplessForCausalLM)
    assert loaded.model.config == any_native.config
    assert loaded.lm_head.weight is loaded.model.embedding.weight
    for name, value in any_native.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name
    assert torch.equal(loaded(tokens).logits, any_native(tokens))


SCRIPT = """
import sys
import skipless.hf
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = load_file(sys.argv[2])["tokens"]
with torch.no_grad():
    save_file({"logits": model(tokens).logits, "text": model.generate(tokens, max_new_tokens=5)}, sys.argv[3])
"""


@torch.no_grad()
def test_a_saved_model_loads_in_a_fresh_process(wrapped, tokens, tmp_path):
    wrapped.save_pretrained(tmp_path)
    save_file({"tokens": tokens}, tmp_path / "in.safetensors")
    files = [str(tmp_path / name) for name in ("in.safetensors", "out.safetensors")]
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), *files], check=True, timeout=120)
    out = load_file(files[1])
    torch.testing.assert_close(out["logits"], wrapped(tokens).logits, rtol=0, atol=1e-5)  # threads may differ
    assert torch.equal(out["text"], wrapped.generate(tokens, max_new_tokens=5))


@torch.no_grad()
def test_bfloat16_loads_as_the_native_model_cast(any_native, tokens, tmp_path):
    SkiplessForCausalLM.from_native(any_native).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded(tokens).logits, any_native.to(torch.bfloat16)(tokens))
    parts = loaded.model.blocks[0].attention.inner.parts(20, torch.device("cpu"), torch.float32)
    assert parts.dtype == torch.float32


def test_missing_weights_are_initialised_and_the_loaded_ones_kept(any_native, tmp_path):
    wrapped = SkiplessForCausalLM.from_native(any_native)
    wrapped.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = [name for name in weights if "blocks.1." in name or name == "model.norm.weight"]
    save_file({n: w for n, w in weights.items() if n not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = loaded.state_dict()
    for name, value in weights.items():
        if name not in gone:
            assert torch.equal(state[name], value), name
    block = loaded.model.blocks[1]
    query = block.attention.inner.query.weight
    assert (query == 0).all() if any_native.config.query_key == "zero-query" else (query != 0).any()
    width = torch.eye(32)
    torch.testing.assert_close(block.attention.inner.output.weight @ block.attention.inner.output.weight.T, width)
    if any_native.config.norm == "pre":
        assert (block.attention.norm.weight == 1).all()
        assert (loaded.model.norm.weight == 1).all()
    if any_native.config.attention_skip.trainable:
        assert block.attention.residual == 0
    if block.attention.inner.value_gains is not None:
        assert (block.attention.inner.value_gains == 1).all()


def test_a_model_can_be_built_without_memory(wrapped):
    with torch.device("meta"):
        empty = SkiplessForCausalLM(wrapped.config)
    assert all(p.is_meta for p in empty.parameters())


@torch.no_grad()
def test_blocks_may_be_offloaded(native, tokens, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    SkiplessForCausalLM.from_native(native).save_pretrained(tmp_path)
    places = {"model.embedding": "cpu", "lm_head": "cpu", "model.norm": "cpu"}
    places |= {f"model.blocks.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=str(tmp_path / "disk"))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    expected = SkiplessForCausalLM.from_native(native)(tokens, attention_mask=mask).logits
    assert torch.equal(loaded(tokens, attention_mask=mask).logits, expected)
