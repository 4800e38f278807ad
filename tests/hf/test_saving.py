import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf.conftest import build
from tests.processes import Program
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from skipless.hf.modeling import (
    SkiplessForCausalLM,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
)
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
    assert loaded.lm_head.weight is (loaded.model.head or loaded.model.embedding).weight
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


@pytest.mark.parametrize(("tied", "gone"), [(True, "embedding"), (False, "embedding"), (False, "head")])
def test_a_missing_embedding_or_head_is_refused(tied, gone, tmp_path):
    """Though transformers has been told that lm_head is another name of one of them."""
    SkiplessForCausalLM.from_native(build(tied_head=tied)).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {n: w for n, w in weights.items() if n != f"model.{gone}.weight"})
    with pytest.raises(ValueError, match=f"model.{gone}.weight missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_sizes_may_be_asked_for_and_the_rest_is_kept(any_native, tmp_path):
    SkiplessForCausalLM.from_native(any_native).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=61, ignore_mismatched_sizes=True)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, any_native.state_dict()[name]) or name in ("embedding.weight", "head.weight")
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
    with pytest.raises(ValueError, match=r"lm_head\.weight other than the matrix it is a name of"):
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


def test_a_classifier_starts_from_a_language_model(wrapped, tokens, tmp_path):
    """With a fresh head of as many classes as are asked for; saved and loaded again it is itself, also bare."""
    wrapped.save_pretrained(tmp_path / "lm")
    for auto, kind in (
        (AutoModelForSequenceClassification, SkiplessForSequenceClassification),
        (AutoModelForTokenClassification, SkiplessForTokenClassification),
    ):
        fresh, found = auto.from_pretrained(tmp_path / "lm", num_labels=3, output_loading_info=True)
        assert isinstance(fresh, kind)
        assert set(found["missing_keys"]) == {"model.head.weight", "model.head.bias"}
        assert torch.equal(fresh.model.hidden(tokens), wrapped.model.hidden(tokens))
        torch.testing.assert_close(fresh.model.head.weight.std(), torch.tensor(32**-0.5), rtol=0.3, atol=0)
        fresh.save_pretrained(tmp_path / "head")
        again = auto.from_pretrained(tmp_path / "head")
        assert torch.equal(again(tokens).logits, fresh(tokens).logits)
        bare = AutoModel.from_pretrained(tmp_path / "head")
        assert torch.equal(bare(tokens).last_hidden_state, fresh.model.hidden(tokens))
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "head", head="lm", classes=0)
        assert torch.equal(back(tokens).logits, wrapped(tokens).logits)


REMOTE = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert "skipless" in sys.modules
loaded.save_pretrained(folder + "/again")
from skipless.hf import SkiplessConfig, SkiplessForCausalLM
assert type(loaded) is SkiplessForCausalLM, type(loaded)
assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)) is SkiplessConfig
"""

STRANGER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "skipless":
            raise ModuleNotFoundError("No module named 'skipless'", name=name)
sys.meta_path.insert(0, Absent())
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def test_a_saved_model_brings_its_code_with_it(wrapped, tmp_path):
    """trust_remote_code=True suffices, the classes are ours, and whoever lacks the package is told its name."""
    wrapped.save_pretrained(tmp_path)
    fresh(REMOTE, tmp_path)
    files = {file.name for file in (tmp_path / "again").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "modeling_skipless.py"}
    complaint = fresh(STRANGER, tmp_path, code=1)
    assert "pip install skipless" in complaint.splitlines()[-1]


@pytest.mark.parametrize(
    ("order", "auto"), [("skipless, transformers", "AutoModel"), ("transformers, skipless", "AutoConfig")]
)
def test_importing_both_registers_the_models(wrapped, tmp_path, order, auto):
    wrapped.save_pretrained(tmp_path)
    steps = [f"import sys, {order}", "assert 'torch' not in sys.modules"]
    if auto == "AutoModel":  # whose parts import the Auto classes while they are imported themselves
        steps.append("transformers.LlamaForCausalLM")
    fresh("\n".join([*steps, f"transformers.{auto}.from_pretrained(sys.argv[1])"]), tmp_path)


def fresh(script: str, folder: Path, code: int = 0) -> str:
    """What a new interpreter, in which nothing is imported yet, writes to stderr."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    words = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == code, done.stderr
    return done.stderr
