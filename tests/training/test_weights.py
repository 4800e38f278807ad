import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from skipless.model.config import ModelConfig
from skipless.model.fold import fold
from skipless.model.transformer import Transformer
from skipless.training.checkpoint import load_weights, model_from_weights, save_weights

CONFIG = ModelConfig(vocab_size=32, width=16, depth=2, heads=2, length=8, activation="gelu")


def make(config: ModelConfig = CONFIG, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "export" / "model.safetensors"
    save_weights(make(), path)
    return path


def test_the_file_alone_is_the_model(path):
    model = make().eval()
    loaded = model_from_weights(path)
    assert loaded.config == CONFIG
    assert not loaded.training
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in loaded.parameters())
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), model(tokens))


def test_any_model_of_that_shape_is_filled(path):
    other = make(seed=1)
    load_weights(other, path)
    for one, two in zip(make().parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_path_may_be_text(tmp_path):
    name = str(tmp_path / "model.safetensors")
    save_weights(make(), name)
    load_weights(other := make(seed=1), name)
    assert torch.equal(other.embedding.weight, make().embedding.weight)
    assert torch.equal(model_from_weights(name).embedding.weight, make().embedding.weight)


def test_equal_weights_make_equal_files(path, tmp_path):
    for _ in range(5):
        save_weights(make(), tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_other_programs_can_read_it(path):
    with safe_open(path, framework="np") as file:
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == set(make().state_dict())


def test_scalars_and_half_precision(tmp_path):
    model = torch.nn.Module()
    model.inner = make(CONFIG.replace(norm="pre")).to(torch.bfloat16)
    model.inner.register_parameter("scalar", torch.nn.Parameter(torch.tensor(2.5)))
    save_weights(model.inner, tmp_path / "w.safetensors")
    other = make(CONFIG.replace(norm="pre"), seed=1).to(torch.bfloat16)
    other.register_parameter("scalar", torch.nn.Parameter(torch.tensor(0.0)))
    load_weights(other, tmp_path / "w.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.inner.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 40}, r"different: embedding.weight is \(32, 16\) there, \(40, 16\) here"),
        ({"depth": 3}, r"missing there: blocks.2.attention.* and \d+ more"),
        ({"depth": 1}, r"unknown here: blocks.1.attention"),
    ],
)
def test_what_does_not_fit_is_named(path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_weights(make(CONFIG.replace(**changes)), path)


def test_damage_is_named(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged \(tensors and settings are not"):
        model_from_weights(path)
    data[-5] ^= 1
    path.write_bytes(data.replace(b'\\"width\\": 16', b'\\"width\\": 17'))
    assert path.read_bytes() != data
    with pytest.raises(ValueError, match=r"damaged \(tensors and settings are not"):
        model_from_weights(path)
    path.write_bytes(data)
    model_from_weights(path)
    os.truncate(path, len(data) - 100)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged, cut short"):
        model_from_weights(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged, cut short"):
        model_from_weights(path)
    path.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        model_from_weights(path)


def test_a_file_without_settings(path):
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="does not say which model"):
        model_from_weights(path)


def test_only_a_transformer_has_settings(tmp_path):
    with pytest.raises(ValueError, match="this is a Linear"):
        save_weights(torch.nn.Linear(1, 1), tmp_path / "x")


def test_a_folded_network_is_not_written_under_settings_it_no_longer_has(tmp_path):
    with pytest.raises(ValueError, match="folded"):
        save_weights(fold(make()), tmp_path / "x")
    assert not (tmp_path / "x").exists()
