"""Runs that end before their last step, and runs that keep no weights."""

import dataclasses

import pytest

from skipless.files import read_json
from skipless.model.config import ModelConfig
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.training.config import Experiment
from skipless.training.load import load
from skipless.training.run import read_metrics, read_result
from skipless.training.trainer import OutOfTime, RunLimits, train


def test_a_run_in_pieces_is_the_same_run(tmp_path, experiment) -> None:
    whole = train(experiment, tmp_path / "whole", quiet=True)
    for step in (1, 2, 3):  # time is up after one step
        with pytest.raises(OutOfTime, match=f"stopped after step {step}"):
            train(experiment, tmp_path / "pieces", resume=True, quiet=True, limits=RunLimits(0.0))
    train(experiment, tmp_path / "pieces", resume=True, quiet=True)
    assert whole.weights is not None
    assert (tmp_path / "pieces" / whole.weights.name).read_bytes() == whole.weights.read_bytes()
    logs = [{r["step"]: r for r in read_metrics(tmp_path / name)} for name in ("whole", "pieces")]
    assert logs[0].items() <= logs[1].items()  # each piece logs its last step too


def test_a_run_without_weights_keeps_its_log(tmp_path, experiment) -> None:
    quick = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, checkpoint_every=0))
    result = train(quick, tmp_path / "run", quiet=True, limits=RunLimits(weights=False))
    assert result.weights is None
    assert result.step_seconds > 0.0
    assert read_result(tmp_path / "run")["weights"] is None
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert read_metrics(tmp_path / "run")[-1]["step"] == quick.train.steps
    with pytest.raises(ValueError, match="finished"):
        train(quick, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize("scheme", [ExponentialSPA(gammas=(2.0, 0.9, 0.1)), UniformSPA(rhos=[0.1, 0.5, 0.6])])
def test_a_schedule_by_block_comes_back_from_json_and_from_a_stopped_run(tmp_path, experiment, scheme) -> None:
    model = experiment.model.replace(scheme=scheme, depth=3)
    assert ModelConfig.from_json(model.to_json()) == model
    assert experiment.with_fields({"model.scheme": scheme, "model.depth": 3}).model == model
    with pytest.raises(ValueError, match="is for 3 blocks, and depth=4; use depth=3"):
        model.replace(depth=4)
    quick = dataclasses.replace(experiment, model=model, train=dataclasses.replace(experiment.train, steps=6))
    whole = train(quick, tmp_path / "whole", quiet=True)
    with pytest.raises(OutOfTime):
        train(quick, tmp_path / "pieces", quiet=True, limits=RunLimits(0.0))
    read = read_json(tmp_path / "pieces" / "experiment.json", Experiment.from_dict)
    assert read == quick
    train(read, tmp_path / "pieces", resume=True, quiet=True)
    assert whole.weights is not None
    assert (tmp_path / "pieces" / whole.weights.name).read_bytes() == whole.weights.read_bytes()
    assert load(tmp_path / "pieces").config.scheme == scheme
