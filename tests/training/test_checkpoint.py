import errno
import logging
import os
import re
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training import checkpoint
from skipless.training.checkpoint import load_checkpoint, save_checkpoint
from skipless.training.config import OptimizerConfig
from skipless.training.optim.build import build_optimizer

CONFIG = ModelConfig(vocab_size=32, width=16, depth=2, heads=2, length=8, activation="gelu")
OPTIMIZERS = {
    "torch-adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "torch-sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "torch-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
} | {
    name: lambda model, name=name: build_optimizer(model, OptimizerConfig(name=name, rate=1e-2, precondition_every=2))
    for name in ("adam", "adamw", "muon", "soap")
}


MIRRORED = CONFIG.replace(mlp_init="mirrored", value_output="identity")
FROZEN = dict.fromkeys(("value", "output", "up"), 0.0)


def make(name: str = "torch-adam", config: ModelConfig = CONFIG, seed: int = 0):
    torch.manual_seed(seed)
    model = Transformer(config)
    return model, OPTIMIZERS[name](model)


def train(model, optimizer, start: int, end: int) -> list[float]:
    losses = []
    for step in range(start, end):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def saved(folder: Path, *steps: int, keep: int = 9) -> dict[int, dict]:
    """Checkpoints of one training at some steps, and the weights at each."""
    model, optimizer = make()
    states = {}
    for start, step in zip((0, *steps), steps, strict=False):
        train(model, optimizer, start, step)
        save_checkpoint(folder, step, model, optimizer, {"ema": step / 3}, keep=keep)
        states[step] = weights(model)
    return states


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pause", [0, 3])
def test_resuming_is_exact(tmp_path, name, pause):
    model, optimizer = make(name)
    expected = train(model, optimizer, 0, 6)

    interrupted, its_optimizer = make(name)
    losses = train(interrupted, its_optimizer, 0, pause)
    save_checkpoint(tmp_path, pause, interrupted, its_optimizer, {"ema": 0.1, "note": ["a", None]}, keep=1)
    assert losses + train(interrupted, its_optimizer, pause, 6) == expected, "saving must not disturb the run"

    resumed, new_optimizer = make(name, seed=1)
    assert load_checkpoint(tmp_path, resumed, new_optimizer) == (pause, {"ema": 0.1, "note": ["a", None]})
    assert losses + train(resumed, new_optimizer, pause, 6) == expected
    assert_equal(weights(resumed), weights(model))


@pytest.mark.parametrize("name", ["adam", "muon", "soap"])
@pytest.mark.parametrize("config", [MIRRORED, CONFIG], ids=["identity", "frozen"])
@pytest.mark.parametrize("pause", [0, 3])
def test_networks_without_values_and_with_frozen_matrices_resume_exactly(tmp_path, name, config, pause):
    settings = OptimizerConfig(name=name, rate=1e-2, precondition_every=2, role_rates=FROZEN)

    def begin(seed: int):
        torch.manual_seed(seed)
        model = Transformer(config)
        return model, build_optimizer(model, settings)

    model, optimizer = begin(0)
    expected = train(model, optimizer, 0, 6)
    interrupted, its_optimizer = begin(0)
    losses = train(interrupted, its_optimizer, 0, pause)
    save_checkpoint(tmp_path, pause, interrupted, its_optimizer, {}, keep=1)
    resumed, new_optimizer = begin(1)
    assert load_checkpoint(tmp_path, resumed, new_optimizer) == (pause, {})
    assert losses + train(resumed, new_optimizer, pause, 6) == expected
    assert_equal(weights(resumed), weights(model))


def test_optimizer_settings_come_back_as_they_were(tmp_path):
    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    train(model, optimizer, 0, 1)
    save_checkpoint(tmp_path, 1, model, optimizer, {}, keep=1)
    other, new_optimizer = make()
    load_checkpoint(tmp_path, other, new_optimizer)
    old, new = optimizer.state_dict()["param_groups"], new_optimizer.state_dict()["param_groups"]
    assert old == new
    assert isinstance(new[0]["betas"], tuple)


def test_nothing_saved_is_none(tmp_path):
    model, optimizer = make()
    assert load_checkpoint(tmp_path / "checkpoints", model, optimizer) is None


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    saved(tmp_path, 1)
    names = sorted(path.name for path in (tmp_path / "step-000001").iterdir())
    assert names == ["shard-00001-model-00001-of-00001.safetensors", "state.json"]


def shard(folder: Path, step: int) -> Path:
    return next((folder / f"step-{step:06d}").glob("*.safetensors"))


def truncate(folder: Path) -> str:
    path = shard(folder, 2)
    os.truncate(path, path.stat().st_size - 10)
    return f"{path.name} has .* bytes instead of"


def flip_a_bit(folder: Path) -> str:
    path = shard(folder, 2)
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    return f"{path.name} is changed"


def remove(folder: Path) -> str:
    path = shard(folder, 2)
    path.unlink()
    return f"{path.name} is missing"


def remove_state(folder: Path) -> str:
    (folder / "step-000002" / "state.json").unlink()
    return "state.json is missing"


def change_state(folder: Path) -> str:
    path = folder / "step-000002" / "state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    return "state.json is changed"


def truncate_state(folder: Path) -> str:
    os.truncate(folder / "step-000002" / "state.json", 100)
    return "state.json is cut short"


def add_a_file(folder: Path) -> str:
    (folder / "step-000002" / "other.safetensors").write_bytes(b"")
    return "other.safetensors does not belong there"


DAMAGES = [truncate, flip_a_bit, remove, remove_state, change_state, truncate_state, add_a_file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(tmp_path, caplog, damage):
    states = saved(tmp_path, 1, 2)
    complaint = damage(tmp_path)
    model, optimizer = make(seed=1)
    with caplog.at_level(logging.WARNING, "skipless"):
        assert load_checkpoint(tmp_path, model, optimizer) == (1, {"ema": 1 / 3})
    (record,) = (record for record in caplog.records if record.name == "skipless")
    assert re.search(complaint, record.getMessage()), record.getMessage()
    assert_equal(weights(model), states[1])

    train(model, optimizer, 1, 2)
    save_checkpoint(tmp_path, 2, model, optimizer, {"ema": 2 / 3}, keep=9)
    fresh, _ = make(seed=2)
    assert load_checkpoint(tmp_path, fresh) == (2, {"ema": 2 / 3})
    assert_equal(weights(fresh), states[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_all_damaged_names_all(tmp_path):
    saved(tmp_path, 1, 2)
    flip_a_bit(tmp_path)
    shard(tmp_path, 1).unlink()
    model, _ = make(seed=1)
    before = weights(model)
    with pytest.raises(ValueError, match=r"no checkpoint .*step-000002/.* is changed.*step-000001/.* is missing"):
        load_checkpoint(tmp_path, model)
    assert_equal(weights(model), before)


def test_another_model_is_refused_before_anything_changes(tmp_path):
    saved(tmp_path, 1)
    for changes, complaint in (
        ({"width": 32}, r"different: model.embedding.weight is float32 \(32, 16\) there, float32 \(32, 32\) here"),
        ({"depth": 3}, r"missing there: model.blocks.2.attention"),
        ({"mlp_bias": False}, r"unknown here: model.blocks.0.mlp.inner.(up|down).bias"),
    ):
        model, optimizer = make(config=CONFIG.replace(**changes))
        before = weights(model)
        with pytest.raises(ValueError, match=complaint):
            load_checkpoint(tmp_path, model, optimizer)
        assert_equal(weights(model), before)


def test_weights_alone(tmp_path):
    model, _ = make()
    save_checkpoint(tmp_path, 5, model, None, {}, keep=1)
    other, optimizer = make(seed=1)
    assert load_checkpoint(tmp_path, other) == (5, {})
    assert_equal(weights(other), weights(model))
    with pytest.raises(ValueError, match="holds no optimiser's state"):
        load_checkpoint(tmp_path, other, optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_retention(tmp_path):
    saved(tmp_path, 1, 2, 3, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    model, optimizer = make()
    save_checkpoint(tmp_path, 1_000_000, model, optimizer, {}, keep=2)
    assert names(tmp_path) == ["step-000003", "step-1000000"]
    assert load_checkpoint(tmp_path, model) == (1_000_000, {})


def test_later_steps_of_an_abandoned_course_go(tmp_path):
    saved(tmp_path, 1, 5)
    model, optimizer = make()
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_leftovers_of_a_killed_write_go_with_the_next_save(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / ".step-000002.skipless-deadbeef").mkdir()
    (tmp_path / ".step-000002.skipless-deadbeef" / "shard-00001.safetensors").write_bytes(b"half")
    model, optimizer = make()
    assert load_checkpoint(tmp_path, model, optimizer) == (1, {"ema": 1 / 3})
    save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_kill_while_replacing_a_checkpoint_loses_neither(tmp_path):
    states = saved(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.old")
    model, optimizer = make(seed=1)
    assert load_checkpoint(tmp_path, model, optimizer) == (1, {"ema": 1 / 3})
    assert_equal(weights(model), states[1])
    save_checkpoint(tmp_path, 1, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["step-000001"]


def test_of_a_replaced_checkpoint_and_its_successor_the_latter_is_taken(tmp_path, monkeypatch):
    """What a kill leaves between the new one's name and the removal of the old one."""
    saved(tmp_path, 1)
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    monkeypatch.setattr(checkpoint, "_retire", lambda *_: None)
    save_checkpoint(tmp_path, 1, model, optimizer, {"ema": 0.25}, keep=1)
    assert names(tmp_path) == ["step-000001", "step-000001.old"]
    other, other_optimizer = make(seed=1)
    assert load_checkpoint(tmp_path, other, other_optimizer) == (1, {"ema": 0.25})
    assert_equal(weights(other), weights(model))


@pytest.fixture
def small_disk():
    """No file may grow beyond 20 kB; a checkpoint here takes 90."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_with_a_remedy(tmp_path, request):
    states = saved(tmp_path, 1)
    model, optimizer = make()
    train(model, optimizer, 0, 2)
    request.getfixturevalue("small_disk")
    with pytest.raises(
        OSError, match=r"step-000002 could not be written \(File too large\).*make room.*--resume"
    ) as seen:
        save_checkpoint(tmp_path, 2, model, optimizer, {}, keep=1)
    assert "\n" not in str(seen.value)
    assert "from step-000001" in str(seen.value)
    assert names(tmp_path) == ["step-000001"]
    assert load_checkpoint(tmp_path, model, optimizer) == (1, {"ema": 1 / 3})
    assert_equal(weights(model), states[1])


def test_a_disk_that_fills_up_while_flushing(tmp_path, monkeypatch):
    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, optimizer = make()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device\): takes .* free: make room.*no older checkpoint"):
        save_checkpoint(tmp_path, 1, model, optimizer, {}, keep=1)
    assert names(tmp_path) == []


def test_what_cannot_be_kept_is_refused(tmp_path):
    model, optimizer = make()
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(tmp_path, 1, model, optimizer, {}, keep=0)
    with pytest.raises(ValueError, match=r"is not JSON.*float\(loss\)"):
        save_checkpoint(tmp_path, 1, model, optimizer, {"loss": torch.ones(1)}, keep=1)
    optimizer.state[model.embedding.weight]["name"] = object()
    with pytest.raises(ValueError, match=r"embedding.weight.name is a object"):
        save_checkpoint(tmp_path, 1, model, optimizer, {}, keep=1)
    assert names(tmp_path) == []
