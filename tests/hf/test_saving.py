import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.processes import Program
from transformers import AutoModelForCausalLM

from skipless.hf.modeling import SkiplessForCausalLM
from skipless.model.fold import fold


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
    Program(SCRIPT, tmp_path, *files).finished()
    out = load_file(files[1])
    torch.testing.assert_close(out["logits"], wrapped(tokens).logits, rtol=0, atol=1e-5)  # threads may differ
    assert torch.equal(out["text"], wrapped.generate(tokens, max_new_tokens=5))


@torch.no_grad()
def test_bfloat16_loads_as_the_native_model_cast(any_native, tokens, tmp_path):
    SkiplessForCausalLM.from_native(any_native).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded(tokens).logits, any_native.to(torch.bfloat16)(tokens))
    parts = loaded.model.blocks[0].attention.inner.bias(20, torch.device("cpu"), torch.float32)
    assert parts.dtype == torch.float32


def rewrite(folder, change) -> None:
    """Replace the weights in a folder by change(weights)."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


def test_missing_weights_are_refused_and_not_drawn_at_random(any_native, tmp_path):
    SkiplessForCausalLM.from_native(any_native).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {name: w for name, w in weights.items() if "blocks.1." not in name})
    with pytest.raises(ValueError, match=r"not those of this network: model\.blocks\.1\..* more missing.*strict=False"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_sizes_may_be_asked_for_and_the_rest_is_kept(any_native, tmp_path):
    SkiplessForCausalLM.from_native(any_native).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=61, ignore_mismatched_sizes=True)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, any_native.state_dict()[name]) or name == "embedding.weight"
    torch.testing.assert_close(loaded.lm_head.weight.std(), torch.tensor(32**-0.5), rtol=0.1, atol=0)


def test_weights_without_a_place_are_refused(wrapped, tmp_path):
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.blocks\.3\..* more without a place"):
        AutoModelForCausalLM.from_pretrained(tmp_path, depth=3)


def test_an_unembedding_of_its_own_is_refused(wrapped, tokens, tmp_path):
    wrapped.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: weights | {"lm_head.weight": weights["model.embedding.weight"].clone()})
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, wrapped(tokens).logits)
    rewrite(tmp_path, lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight other than the embedding"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_loading_found_is_told_on_request(wrapped, tmp_path):
    wrapped.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, SkiplessForCausalLM)
    assert not info["missing_keys"]


def test_a_folded_network_is_not_saved_under_the_unfolded_config(native, tokens, tmp_path):
    folded = SkiplessForCausalLM.from_native(fold(native.double()))
    assert folded.generate(tokens, max_new_tokens=2).shape == (3, 22)
    with pytest.raises(ValueError, match=r"folded.*FoldedTransformer\.load"):
        folded.save_pretrained(tmp_path)


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
