"""On a GPU: runs with and without a CUDA graph of the step are the same run, and no step waits for the device."""

import dataclasses
import warnings

import pytest
import torch
from safetensors.torch import load_file

from skipless.data.loader import Batch
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA
from skipless.training.config import OptimizerConfig, TrainConfig
from skipless.training.cuda_graph import GraphedStep
from skipless.training.distributed import World
from skipless.training.divergence import Diverged
from skipless.training.optim.build import build_optimizer
from skipless.training.run import read_metrics
from skipless.training.trainer import TrainStep, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

WAYS = {
    "plain": {},
    "compiled-bf16": {"compile": True, "precision": "bf16"},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": True},
    "packed": {},
}


def losses(folder) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def wide(experiment, name="adam", **fields):
    """The tests' experiment with heads of 16, which GPU kernels take, logging every step."""
    fields = {"log_every": 1, **fields}
    return dataclasses.replace(
        experiment,
        model=experiment.model.replace(width=64),
        optimizer=dataclasses.replace(experiment.optimizer, name=name, weight_decay=0.1),
        train=dataclasses.replace(experiment.train, **fields),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["adam", "muon", "soap"])
def test_a_run_with_a_graph_is_the_run_without(experiment, tmp_path, name, way):
    runs = {}
    for choice in ("on", "off"):
        asked = wide(experiment, name, cuda_graph=choice, **WAYS[way])
        if way == "packed":
            asked = dataclasses.replace(asked, data=dataclasses.replace(asked.data, packed=True))
        train(asked, tmp_path / choice, device="cuda", quiet=True)
        runs[choice] = torch.tensor(losses(tmp_path / choice))
    assert len(runs["on"]) == 24
    rough = "bf16" in way
    torch.testing.assert_close(runs["on"], runs["off"], rtol=1e-3 if rough else 1e-5, atol=1e-6)
    if not rough:
        on, off = (load_file(tmp_path / choice / "model.safetensors") for choice in ("on", "off"))
        for key in on:
            torch.testing.assert_close(on[key], off[key], rtol=1e-4, atol=1e-5)


def test_a_network_whose_attention_is_a_table_trains(experiment, tmp_path):
    """Heads of 64, for which FlexAttention's kernel does not fit."""
    scheme = ExponentialSPA(0.2, 0.01, calibration="mlp-aware")
    model = experiment.model.replace(width=64, heads=1, scheme=scheme, activation="tanh")
    asked = dataclasses.replace(wide(experiment, compile=True, precision="bf16"), model=model)
    train(asked, tmp_path / "run", device="cuda", quiet=True)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", ["adam", "muon", "soap"])
def test_a_captured_run_resumes_from_its_checkpoint(experiment, tmp_path, name, monkeypatch):
    from skipless.training import divergence, trainer

    asked = wide(experiment, name, cuda_graph="on")
    train(asked, tmp_path / "whole", device="cuda", quiet=True)
    honest = divergence.check_finite

    def stops(model, first, *others):
        if first == 14:
            raise Diverged(14, "stopped by the test")
        honest(model, first, *others)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "check_finite", stops)
        with pytest.raises(Diverged, match="stopped by the test"):
            train(asked, tmp_path / "stopped", device="cuda", quiet=True)
    train(asked, tmp_path / "stopped", resume=True, device="cuda", quiet=True)
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "stopped")), torch.tensor(losses(tmp_path / "whole")), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("impl", ["auto", "flex", "sdpa"])
@pytest.mark.parametrize("name", ["adam", "muon"])
def test_replays_do_not_wait_for_the_device(name, impl):
    torch.manual_seed(0)
    config = preset("wikitext103/e-spa", width=64, heads=4, depth=8, vocab_size=64, length=128)
    with torch.device("cuda"):
        model = Transformer(config, impl=impl).compile_blocks()
    optimizer = build_optimizer(model, OptimizerConfig(name), capturable=True)
    world = World(0, 1, torch.device("cuda", 0))
    schedule = TrainConfig(steps=50, warmup=5, length=128, batch_size=4)
    advance = GraphedStep(TrainStep(model, optimizer, schedule, world, clip=0.1, packed=False))
    batch = Batch(torch.randint(64, (4, 129), device="cuda"))
    outputs = [advance(0, batch)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs += [advance(step, batch) for step in range(1, 20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [loss.item() for loss, _ in outputs]
    assert len(set(found)) == 20
    assert found[-1] < found[0]
