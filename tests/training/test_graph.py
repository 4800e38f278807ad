"""The captured step without a GPU: a recorder that runs the function again stands in for CUDA's graphs."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from skipless.data.loader import Batch
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA
from skipless.training import trainer
from skipless.training.config import DataConfig, Experiment, OptimizerConfig, TrainConfig
from skipless.training.cuda_graph import GraphedStep, unchanged
from skipless.training.distributed import World
from skipless.training.divergence import Diverged
from skipless.training.optim.build import build_optimizer, use_tensor_rates
from skipless.training.trainer import TrainStep, train, uses_graph, why_no_graph

HERE = World(0, 1, torch.device("cpu"))
NETWORK = ModelConfig(
    vocab_size=40, width=32, depth=3, heads=2, length=16, scheme=ExponentialSPA(0.05, 0.06), activation="gelu"
)
CONFIGS = {
    "adam": OptimizerConfig("adam", rate=1e-3, embedding_rate=1e-3, weight_decay=0.1),
    "adamw": OptimizerConfig("adamw", rate=1e-3, embedding_rate=1e-3, weight_decay=0.1),
    "muon": OptimizerConfig("muon", rate=1e-2, embedding_rate=1e-3, weight_decay=0.1),
    "soap": OptimizerConfig("soap", rate=1e-3, embedding_rate=1e-3, weight_decay=0.1, precondition_every=2),
}


class Rerun:
    """Replays by running the function again; its outputs are always the same tensors, as a graph's are."""

    def __init__(self):
        self.captures = 0

    def warm_up(self, function):
        function()

    def capture(self, function):
        self.captures += 1
        outputs = []

        def replay():
            results = function()
            if not outputs:
                outputs.extend(torch.full_like(result, torch.nan) for result in results)
            for own, new in zip(outputs, results, strict=True):
                own.copy_(new)
            return tuple(outputs)

        return replay


def build(name="adam", *, tensors=True, **fields) -> TrainStep:
    torch.manual_seed(0)
    model = Transformer(NETWORK, impl="sdpa")
    optimizer = build_optimizer(model, CONFIGS[name])
    if tensors:
        use_tensor_rates(optimizer)
    config = TrainConfig(steps=50, warmup=5, length=16, batch_size=4, precision="fp32", **fields)
    return TrainStep(model, optimizer, config, HERE, clip=0.1, packed=True)


def batch_of(step: int, rows: int = 4, packed: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(40, (rows, 17), generator=generator)
    documents = torch.randint(0, 2, (rows, 16), generator=generator).cumsum(1) if packed else None
    return Batch(tokens, documents)


def run(advance, steps, start=0, packed=False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [advance(step, batch_of(step, packed=packed)) for step in range(start, start + steps)]


def assert_equal_steps(one: TrainStep, two: TrainStep) -> None:
    for (name, a), (_, b) in zip(one.model.named_parameters(), two.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        mine, other = one.optimizer.state[a], two.optimizer.state[b]
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_are_the_eager_ones_from_the_first(name, accumulate, packed):
    """Losses, norms, weights and the optimiser's state, step counts included."""
    eager, captured = build(name, accumulate=accumulate), build(name, accumulate=accumulate)
    ours = run(GraphedStep(captured, Rerun()), 6, packed=packed)
    theirs = run(eager, 6, packed=packed)
    assert [(a.item(), b.item()) for a, b in ours] == [(a.item(), b.item()) for a, b in theirs]
    assert_equal_steps(captured, eager)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_frozen_matrix_does_not_keep_the_step_out_of_the_graph(name):
    eager, captured, recorder = build(name), build(name), Rerun()
    for step in (eager, captured):
        step.model.get_parameter("blocks.0.attention.inner.value.weight").requires_grad_(False)
    run(GraphedStep(captured, recorder), 4)
    run(eager, 4)
    assert recorder.captures == 1
    assert_equal_steps(captured, eager)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_rates_as_tensors_give_the_updates_of_rates_as_numbers(name):
    """The tensors are float32, so that a rate may differ in its eighth digit, which SOAP's bases may turn on."""
    ours, theirs = build(name), build(name, tensors=False)
    for a, b in zip(run(ours, 6), run(theirs, 6), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_warming_up_leaves_no_trace(name, steps):
    """Neither in the values nor in where they are: a graph reads them by address."""
    step = build(name)
    run(step, steps)
    before = copy.deepcopy((list(step.model.parameters()), list(step.optimizer.state.values())))
    places = [p.data_ptr() for p in step.model.parameters()]
    with unchanged(step.model, step.optimizer):
        run(step, 2, start=steps)
    assert places == [p.data_ptr() for p in step.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before[0], step.model.parameters(), strict=True))
    assert all(p.grad is None for p in step.model.parameters())
    assert len(step.optimizer.state) == len(places)
    for index, state in enumerate(step.optimizer.state.values()):
        for key, value in state.items():
            assert torch.equal(value, before[1][index][key] if steps else torch.zeros_like(value))


def test_what_was_returned_stays_as_it_was():
    outputs = run(GraphedStep(build(), Rerun()), 4)
    assert len({loss.item() for loss, _ in outputs}) == 4
    assert len({norm.item() for _, norm in outputs}) == 4


def test_a_loaded_state_and_another_shape_are_captured_anew():
    step, recorder = build(), Rerun()
    advance = GraphedStep(step, recorder)
    run(advance, 3)
    assert recorder.captures == 1
    saved = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
    first = run(advance, 2, start=3)
    step.model.load_state_dict(saved[0])
    step.optimizer.load_state_dict(saved[1])
    again = run(advance, 2, start=3)
    assert recorder.captures == 2
    assert [a.item() for a, _ in first] == [a.item() for a, _ in again]
    advance(5, batch_of(5, rows=2))
    assert recorder.captures == 3


def test_parts_that_a_longer_sequence_replaces_are_kept():
    """The model builds new ones for 5,000 locations; the graph still reads the old."""
    step = build()
    advance = GraphedStep(step, Rerun())
    run(advance, 1)
    old = step.model.blocks[0].attention.inner._bias
    step.model(torch.zeros(1, 5000, dtype=torch.long))
    assert step.model.blocks[0].attention.inner._bias is not old
    assert advance._read[0] is old


def test_rates_as_numbers_are_refused():
    with pytest.raises(ValueError, match=r"'embedding' is the number 0\.001.*capturable=True"):
        GraphedStep(build(tensors=False), Rerun())


def test_a_step_that_cannot_be_captured_says_what_to_do():
    class Fails(Rerun):
        def capture(self, function):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=r"not permitted.*--set train\.cuda_graph=off"):
        run(GraphedStep(build(), Fails()), 1)


def experiment_of(optimizer="adam", choice="auto", **network) -> Experiment:
    train = TrainConfig(steps=50, warmup=5, cuda_graph=choice)
    return Experiment("test", NETWORK.replace(**network), DataConfig(), OptimizerConfig(optimizer), train)


@pytest.mark.parametrize(
    ("experiment", "world", "words"),
    [
        (experiment_of(), HERE, "the device is cpu, and CUDA graphs need an NVIDIA GPU"),
        (experiment_of(), World(0, 2, torch.device("cuda")), "2 processes"),
        (experiment_of(position="relative"), World(0, 1, torch.device("cuda")), "relative positions"),
    ],
)
def test_what_cannot_be_captured_runs_without_by_auto_and_not_at_all_by_on(experiment, world, words, caplog):
    assert words in why_no_graph(experiment, world)
    with caplog.at_level("INFO", logger="skipless"):
        assert not uses_graph(experiment, world)
    assert words in caplog.text
    asked = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, cuda_graph="on"))
    with pytest.raises(ValueError, match=f"train.cuda_graph is 'on', but .*{words}.*cuda_graph=auto"):
        uses_graph(asked, world)


def test_a_single_gpu_is_used_unless_it_is_off():
    world = World(0, 1, torch.device("cuda"))
    assert [uses_graph(experiment_of("muon", choice), world) for choice in ("auto", "on", "off")] == [True, True, False]


def take_the_graphs_path(monkeypatch) -> None:
    """Runs of `train` are captured on a CPU, with Rerun in CUDA's place."""

    def tensor_rates(model, config, *, capturable):
        optimizer = build_optimizer(model, config)
        use_tensor_rates(optimizer)
        return optimizer

    monkeypatch.setattr(trainer, "why_no_graph", lambda *_: None)
    monkeypatch.setattr(trainer, "build_optimizer", tensor_rates)
    monkeypatch.setattr(trainer, "GraphedStep", partial(GraphedStep, recorder=Rerun()))


@pytest.fixture
def captured_on_a_cpu(monkeypatch):
    take_the_graphs_path(monkeypatch)


def poison(monkeypatch, call: int) -> None:
    """Make the loss of one call NaN; each capture makes three that do not count."""
    honest, calls = trainer.cross_entropy, []

    def failing(model, batch, packed):
        calls.append(1)
        return honest(model, batch, packed) * (float("nan") if len(calls) == call else 1.0)

    monkeypatch.setattr(trainer, "cross_entropy", failing)


@pytest.mark.parametrize("name", ["adam", "soap"])
def test_a_run_with_a_graph_is_the_run_without_and_resumes(experiment, tmp_path, captured_on_a_cpu, monkeypatch, name):
    optimizer = dataclasses.replace(experiment.optimizer, name=name, precondition_every=4)

    def changed(choice):
        schedule = dataclasses.replace(experiment.train, cuda_graph=choice)
        return dataclasses.replace(experiment, train=schedule, optimizer=optimizer)

    train(changed("off"), tmp_path / "off", device="cpu", quiet=True)
    train(changed("on"), tmp_path / "on", device="cpu", quiet=True)
    with monkeypatch.context() as patch:
        poison(patch, 3 + 15)
        with pytest.raises(Diverged, match="at step 15"):
            train(changed("auto"), tmp_path / "auto", device="cpu", quiet=True)
    train(changed("auto"), tmp_path / "auto", resume=True, device="cpu", quiet=True)
    off, on, auto = (load_file(tmp_path / run / "model.safetensors") for run in ("off", "on", "auto"))
    for other in (on, auto):
        assert all(torch.equal(off[key], other[key]) for key in off)
    logs = {(tmp_path / run / "metrics.jsonl").read_text() for run in ("off", "on", "auto")}
    assert len(logs) == 1


def test_after_divergence_the_run_goes_on_from_a_new_capture(
    experiment, tmp_path, captured_on_a_cpu, monkeypatch, caplog
):
    poison(monkeypatch, 3 + 9)
    schedule = dataclasses.replace(experiment.train, on_divergence="halve-lr", cuda_graph="on")
    result = train(dataclasses.replace(experiment, train=schedule), tmp_path / "run", device="cpu", quiet=True)
    assert "Goes back to step 6 with 0.5 of the rate" in caplog.text
    assert result.steps == 24
    assert result.valid.loss < 6.0


@pytest.mark.parametrize("name", ["adam", "muon"])
@pytest.mark.parametrize("ways", [("graph", "eager"), ("eager", "graph")])
def test_a_checkpoint_changes_hands_between_a_graph_and_none(experiment, tmp_path, monkeypatch, ways, name):
    """One has rates as tensors and the other as numbers, as a GPU's run and a CPU's do."""
    experiment = dataclasses.replace(experiment, optimizer=dataclasses.replace(experiment.optimizer, name=name))
    train(experiment, tmp_path / "whole", device="cpu", quiet=True)
    with monkeypatch.context() as patch:
        if ways[0] == "graph":
            take_the_graphs_path(patch)
        poison(patch, 15 + 3 * (ways[0] == "graph"))
        with pytest.raises(Diverged, match="at step 15"):
            train(experiment, tmp_path / "taken-up", device="cpu", quiet=True)
    with monkeypatch.context() as patch:
        if ways[1] == "graph":
            take_the_graphs_path(patch)
        train(experiment, tmp_path / "taken-up", resume=True, device="cpu", quiet=True)
    whole, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "taken-up"))
    for key in whole:
        torch.testing.assert_close(other[key], whole[key], rtol=1e-4, atol=1e-5)
