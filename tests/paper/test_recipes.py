"""Recipes: what follows from the data, and training by one call."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

import skipless
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import read_manifest
from skipless.data.tokenizer import Bytes
from skipless.model.config import ModelConfig
from skipless.paper.experiments import SCALES
from skipless.paper.recipes import _path_of, by_law, plan, prepared, recipe, settle, train, with_data
from skipless.paper.records import Text
from skipless.paper.tables import TABLES
from skipless.training.config import DataConfig, OptimizerConfig, TrainConfig
from skipless.training.run import read_experiment

SMALL = {"depth": 2, "width": 32, "heads": 4, "length": 16, "batch_size": 4, "activation": "gelu"}
CPU = {"precision": "fp32", "compile": False, "device": "cpu", "quiet": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    (place / "text.txt").write_text("\n\n\n".join(f"The signal no. {n} goes through {n} blocks." for n in range(40)))
    prepare(Preparation(str(place / "text.txt"), Bytes(), valid_fraction=0.2), place / "tokens", workers=1)
    return place / "tokens"


def test_vocabulary_and_repeat_rate_come_from_the_tokens(folder, caplog):
    caplog.set_level(logging.INFO)
    experiment, given = plan("e-spa", folder)
    found = with_data(experiment, given=given).model
    rate = read_manifest(folder).splits["train"].repeat_rate
    assert (found.vocab_size, found.scheme.repeat_rate) == (256, round(rate or 0.0, 3)) != (256, 0.008)
    assert f"from the tokens of {folder}: vocab_size=256, repeat_rate=" in caplog.text
    set_ = experiment.with_fields({"model.vocab_size": 300, "model.scheme.repeat_rate": "0.07"})
    names = {"model.vocab_size", "model.scheme.repeat_rate"}
    assert with_data(set_, given=names).model == set_.model
    assert with_data(plan("pre-ln", folder)[0], given=()).model.vocab_size == 256


def test_an_experiment_keeps_what_it_says(folder, tmp_path, caplog):
    experiment = recipe("wikitext103/e-spa").override(f"data.folder={folder}")
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    for source in (experiment, tmp_path / "experiment.json", str(tmp_path / "experiment.json")):
        found, given = plan(source)
        assert with_data(found, given=given) == experiment
    assert "the scheme assumes repeat_rate=0.008 and these tokens have" in caplog.text
    with pytest.raises(ValueError, match=r"is a run: give .*experiment.json, and --out .* --resume to go on with it"):
        plan(tmp_path)


def test_a_vocabulary_that_is_set_decides_what_is_prepared(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words\n\n\n" * 50)
    experiment = recipe("wikitext103/pre-ln").with_fields({"data.corpus": str(text), "model.vocab_size": 256})
    found = with_data(experiment, tmp_path, given={"model.vocab_size"})
    assert found.data.folder == str(tmp_path / "text-bytes")


def test_a_glob_is_prepared_where_the_command_prepares_it(tmp_path, monkeypatch):
    """Under the name of its folder; an asterisk is no name of one."""
    (tmp_path / "articles").mkdir()
    (tmp_path / "articles" / "a.txt").write_text("a few words\n\n\n" * 50)
    monkeypatch.chdir(tmp_path)
    assert prepared("articles/*.txt", 256) == Path("data/articles-bytes")
    assert (tmp_path / "data" / "articles-bytes" / "manifest.json").is_file()


def test_every_field_has_one_plain_name():
    experiment = recipe("wikitext103/e-spa")
    kinds = {"model": ModelConfig, "train": TrainConfig, "optimizer": OptimizerConfig, "data": DataConfig}
    names = [field.name for kind in kinds.values() for field in dataclasses.fields(kind)]
    assert {name for name in names if names.count(name) > 1} == {"length"}, "which follow each other"
    assert [_path_of(experiment, name) for name in ("depth", "steps", "rate", "optimizer", "name", "gamma_final")] == [
        "model.depth", "train.steps", "optimizer.rate", "optimizer.name", "name", "model.scheme.gamma_final",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no setting 'step'; did you mean 'steps'"):
        train("e-spa", step=3)
    with pytest.raises(ValueError, match="no setting 'gamma_final'"):
        train("pre-ln", gamma_final=0.2)
    with pytest.raises(ValueError, match=r"no setting 'lr'; did you mean 'rate'"):
        train("e-spa", lr=1e-3)
    with pytest.raises(ValueError, match="experiment is a Linear; it must be a recipe's name such as 'e-spa'"):
        train(torch.nn.Linear(1, 1))


def test_one_call_trains_and_another_loads(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"data": folder, "steps": 20, "gamma_final": 0.2, "optimizer": "muon", "role_rates": {"value": 0.5}}
    result = skipless.train("wikitext103/e-spa", out="runs/e-spa", **settings, **SMALL, **CPU)
    assert result.steps == 20
    kept = read_experiment("runs/e-spa")
    assert (kept.train.warmup, kept.train.length, kept.model.length, kept.model.vocab_size) == (2, 16, 16, 256)
    assert (kept.model.scheme.gamma_final, kept.optimizer.name, kept.optimizer.role_rates) == (
        0.2, "muon", {"value": 0.5},
    )  # fmt: skip
    model = skipless.load("runs/e-spa")
    text = model.generate("The signal", 12)
    assert text.startswith("The signal")
    tokens = torch.tensor([list(b"The signal")])
    assert torch.equal(model.generate(tokens, 12), skipless.generate(model, tokens, 12))
    with pytest.raises(ValueError, match="is finished"):
        skipless.train("wikitext103/e-spa", out="runs/e-spa", **settings, **SMALL, **CPU)


def test_validation_text_is_prepared_beforehand(tmp_path):
    """data.valid names a prepared folder, as in training; one that is none is said before the corpus is read."""
    text = tmp_path / "text.txt"
    text.write_text("a few words\n" * 500)
    experiment = dataclasses.replace(recipe("wikitext103/pre-ln"), data=DataConfig(corpus=str(text), vocab=257))
    folder = with_data(experiment, tmp_path).data.folder
    again = with_data(experiment.override(f"data.valid={folder}"), tmp_path).data
    assert (again.folder, again.valid) == (folder, folder)
    with pytest.raises(ValueError, match=r"text\.txt is not a prepared folder"):
        with_data(experiment.override(f"data.valid={text}"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "arm"), [("mirrored", "mirrored-gain/muon"), ("mirrored/e-spa-values", "mirrored/muon")]
)
def test_a_mirrored_recipe_is_the_run_that_was_measured(name, arm):
    """The rates of results/mirrored-small.md, at its size and on its text."""
    text = Text("train-00", 32_000, 0.008, 7.5206, 28_887_622, "830a93a67e30")
    measured = TABLES["mirrored"].arm(arm).experiment(SCALES["small"], text, 2e-3, embedding_rate=1e-2)
    found = recipe(name)
    assert (found.model, found.optimizer) == (measured.model, measured.optimizer)
    assert (found.train.steps, found.train.batch_size, found.train.length) == (1500, 32, 256)
    assert found.train.warmup == measured.train.warmup


def test_a_mirrored_recipe_of_another_size_has_the_measured_law():
    """rate·depth stays, whatever the width; heads have 64 numbers. What is asked for stands."""
    mirrored, paper = recipe("mirrored"), recipe("e-spa")
    rate, depth = mirrored.optimizer.rate, mirrored.model.depth
    sized = by_law(mirrored, {"model.depth": "72", "model.width": 512})
    assert sized == {"optimizer.rate": rate * depth / 72, "model.heads": 8}
    assert by_law(mirrored, {"model.depth": 216})["optimizer.rate"] == pytest.approx(rate * depth / 216, rel=2e-3)
    assert by_law(mirrored, {"model.depth": depth})["optimizer.rate"] == rate
    assert by_law(mirrored, {"model.depth": 72, "optimizer.rate": 1e-4}) == {}
    assert by_law(mirrored, {"model.depth": 72, "optimizer.name": "adam"}) == {}
    assert by_law(mirrored, {"model.width": 512, "model.heads": 4}) == {}
    assert by_law(mirrored, {"model.width": 100, "model.depth": "deep"}) == {}
    assert by_law(paper, {"model.depth": 72, "model.width": 512}) == {}
    readers = recipe("mirrored/e-spa-readers")
    assert readers.optimizer.role_rates["query"] == 3 * readers.optimizer.role_rates["up"]
    assert mirrored.optimizer.role_rates["query"] == 6 * mirrored.optimizer.role_rates["up"]
    assert by_law(readers, {"model.width": 512}) == {"model.heads": 8, "model.readers": 4}
    assert by_law(readers, {"model.width": 512, "model.readers": 1}) == {"model.heads": 8}


def test_a_scheme_by_its_name_alone_has_the_repeat_rate_of_the_tokens(folder):
    experiment, given = plan("e-spa", folder)
    rate = round(read_manifest(folder).splits["train"].repeat_rate or 0.0, 3)
    whole = skipless.UniformSPA(repeat_rate=0.5)  # is given with all its fields, as its JSON is
    for scheme, expected in (("u-spa", rate), ('{"kind": "u-spa", "repeat_rate": 0.5}', 0.5), (whole, 0.5)):
        found = settle(experiment, given, {"model.scheme": scheme}).model.scheme
        assert (type(found).__name__, found.repeat_rate) == ("UniformSPA", expected)
