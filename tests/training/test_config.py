import json

import pytest

from skipless.model.config import ModelConfig
from skipless.model.presets import names, preset
from skipless.paper.recipes import plan, recipe
from skipless.theory.schemes import ExponentialSPA
from skipless.training.config import DataConfig, Experiment, OptimizerConfig, TrainConfig


def small(**train):
    schedule = TrainConfig(**{"steps": 100, "warmup": 10, "length": 32, **train})
    return Experiment("small", preset("wikitext103/e-spa", width=64, depth=8), train=schedule)


def test_json_gives_back_an_equal_experiment():
    experiment = small(probe_at=(0, 50)).override("optimizer.name=muon", "data.packed=true")
    assert Experiment.from_json(experiment.to_json()) == experiment


def test_any_field_can_be_set_and_dependent_ones_together():
    changed = small().override(
        "train.steps=5", "train.warmup=1", "model.scheme.gamma_final=0.2", "optimizer.rate=1e-3", "data.corpus=a=b.txt",
        "train.compile=false", "train.probe_at=0,3", "optimizer.clip=none", "model.width=128",
    )  # fmt: skip
    assert (changed.train.steps, changed.train.warmup, changed.train.probe_at) == (5, 1, (0, 3))
    assert changed.model.scheme == ExponentialSPA(0.2, 0.008)
    assert (changed.model.width, changed.model.hidden) == (128, 512)
    assert (changed.optimizer.rate, changed.optimizer.clip) == (1e-3, None)
    assert (changed.data.corpus, changed.train.compile) == ("a=b.txt", False)


@pytest.mark.parametrize("text", ["value,output", '["value", "output"]', "('value', 'output')"])
def test_a_list_may_be_written_as_json_or_python_has_it(text):
    assert small().override(f"optimizer.keep_orthogonal={text}").optimizer.keep_orthogonal == ("value", "output")


def test_a_mapping_is_set_by_its_keys_or_as_a_whole_or_both():
    by_key = small().override("optimizer.role_rates.up=0.2", "optimizer.role_rates.down=.5")
    assert by_key.optimizer.role_rates == {"up": 0.2, "down": 0.5}
    assert by_key.override("optimizer.role_rates.up=1").optimizer.role_rates == {"up": 1.0, "down": 0.5}
    assert by_key.override('optimizer.role_rates={"key": 2}').optimizer.role_rates == {"key": 2}
    both = by_key.override('optimizer.role_rates={"key": 2}', "optimizer.role_rates.up=3").optimizer.role_rates
    assert both == {"key": 2, "up": 3.0}


def test_a_field_set_as_a_whole_and_in_part_is_refused():
    with pytest.raises(ValueError, match=r"names model as a whole and model\.width within it; one of the two"):
        small().override("model={}", "model.width=128")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.stps=3", "train.stps: TrainConfig has no such field; did you mean 'steps'"),
        ("trian.steps=3", "did you mean 'train'"),
        ("train.steps=many", "train.steps is 'many'; it must be a whole number"),
        ("train.compile=maybe", "must be true or false"),
        ("train.precision=fp8", "one of 'bf16', 'fp16', 'fp32'"),
        ("train.steps.more=3", "nothing lies below it"),
        ("train.steps", "has no '='"),
        ("model.depht=3", "did you mean 'depth'"),
        ("train.warmup=100", "leaves no step of 100"),
        ("train.steps=0", "train.steps is 0"),
        ("optimizer.name=adm", "adam"),
        ("optimizer.role_rates={value: 2}", "optimizer.role_rates is '{value: 2}', which is not JSON"),
        ("optimizer.role_rates=3", "is '3', not a mapping; write it as .*, or set optimizer.role_rates.value=0.5"),
        ("optimizer.role_rates.up=fast", "optimizer.role_rates.up is 'fast'; it must be a number"),
        ("optimizer.role_rates.upp=3", "upp"),
        ("train=3", "train cannot be set from text; set a field below it, such as train.steps="),
        ('train={"steps": 3}', "train cannot be set from text"),
        ("model.mlp_skip=3", "model.mlp_skip cannot be set from text; .* such as model.mlp_skip.shortcut="),
        ("optimizer.role_rates.up.more=3", "optimizer.role_rates.up is a plain value"),
    ],
)
def test_a_wrong_override_is_named_with_a_remedy(assignment, words):
    with pytest.raises(ValueError, match=words):
        small().override(assignment)


def test_unknown_fields_of_a_file_are_errors():
    with pytest.raises(ValueError, match="train has no field 'step'; did you mean 'steps'"):
        Experiment.from_json(small().to_json().replace('"steps"', '"step"'))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("train.precision", "fp8", "train.precision is 'fp8'; it must be one of 'bf16', 'fp16', 'fp32'"),
        ("train.steps", "20", "train.steps is '20'; it must be a whole number"),
        ("train.steps", 20.5, "train.steps is 20.5; it must be a whole number"),
        ("train.steps", True, "train.steps is True; it must be a whole number"),
        ("train.compile", 1, "train.compile is 1; it must be true or false"),
        ("train.probe_at", 3, "train.probe_at is 3; it must be a list"),
        ("train.probe_at", ["a"], r"train.probe_at\[0\] is 'a'; it must be a whole number"),
        ("data.folder", 3, "data.folder is 3; it must be text"),
        ("optimizer.clip", "none", "optimizer.clip is 'none'; it must be a number"),
        ("optimizer.role_rates", {"up": "fast"}, "optimizer.role_rates.up is 'fast'; it must be a number"),
        ("model.width", "64", "model.width is '64'; it must be a whole number"),
        ("model.mlp_skip", {"shortcut": None}, "model.mlp_skip.shortcut is None; it must be a number"),
        ("model.scheme", {"kind": "e-spa", "gama": 1}, "ExponentialSPA has no field .gama."),
        ("train", [], r"train is \[\]; it must be a mapping of steps"),
        ("trian", {}, "an experiment has no field 'trian'; did you mean 'train'"),
        ("name", None, "an experiment is a mapping with a name"),
    ],
)
def test_a_wrong_value_of_a_file_is_named(field, value, words):
    plain = json.loads(small().to_json())
    *above, name = field.split(".")
    (plain[above[0]] if above else plain)[name] = value
    with pytest.raises(ValueError, match=words):
        Experiment.from_json(json.dumps(plain))


def test_what_a_file_may_leave_out_and_how_numbers_may_be_written():
    assert Experiment.from_json('{"name": "a"}') == Experiment("a")
    written = Experiment.from_json('{"name": "a", "train": {"steps": 5e3}, "optimizer": {"clip": 1, "rate": null}}')
    assert repr(written.train.steps) == "5000"
    assert (written.optimizer.clip, written.optimizer.rate) == (1, None)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '"a"'])
def test_a_file_that_is_no_experiment_is_named(tmp_path, text):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.json is not an experiment \("):
        plan(tmp_path / "mine.json")


def test_micro_batches_that_do_not_divide_the_batch_are_named_with_some_that_do():
    with pytest.raises(ValueError, match="accumulate=3 does not divide batch_size=8; the nearest is 2"):
        TrainConfig(batch_size=8, accumulate=3)


def test_the_warm_up_is_a_tenth_of_the_steps_unless_given():
    """At most the paper's 4,000 steps, which its own recipes have."""
    assert [TrainConfig(steps=steps).warmup for steps in (1, 200, 40_000, 100_000)] == [0, 20, 4_000, 4_000]
    assert TrainConfig(steps=200, warmup=7).replace(steps=500).warmup == 7
    assert TrainConfig(steps=200).replace(steps=500).warmup == 50
    assert TrainConfig(steps=200).replace(steps=500, warmup=3).warmup == 3
    assert recipe("wikitext103/e-spa").override("train.steps=500").train.warmup == 50
    old = Experiment.from_json('{"name": "a", "train": {"steps": 8000, "warmup": 4000, "length": 512}}')
    assert (old.train.warmup, old.override("train.seed=1").train.warmup) == (4_000, 4_000)


def test_the_two_lengths_follow_each_other():
    assert Experiment("a", ModelConfig(width=32, heads=4, depth=2, length=64, activation="gelu")).train.length == 64
    experiment = recipe("wikitext103/e-spa")
    for name in ("model.length", "train.length"):
        changed = experiment.override(f"{name}=1_28")
        assert (changed.model.length, changed.train.length) == (128, 128)
    with pytest.raises(ValueError, match=r"model\.length=64 and train\.length=32 differ"):
        experiment.override("model.length=64", "train.length=32")
    assert experiment.override("model.length=64", "train.length=64").train.length == 64
    old = Experiment("b", experiment.model, train=TrainConfig(length=256))
    assert Experiment.from_json(old.to_json()) == old
    assert (old.override("train.seed=1").model.length, old.override("train.seed=1").train.length) == (512, 256)


def test_recipes_are_appendix_h():
    espa, c4 = recipe("wikitext103/e-spa"), recipe("c4/pre-ln")
    assert (espa.train.steps, espa.train.batch_size, espa.train.length, espa.train.warmup) == (100_000, 16, 512, 4_000)
    assert (c4.train.steps, c4.train.batch_size, c4.train.length) == (50_000, 8, 2_048)
    assert (espa.optimizer.embedding_rate, c4.optimizer.embedding_rate) == (2e-4, 5e-4)
    assert (espa.optimizer.name, espa.optimizer.clip, espa.optimizer.weight_decay) == ("adam", 0.1, 0.0)
    assert espa.data == DataConfig("wikitext-103", vocab=32_000)
    assert OptimizerConfig().betas == (0.9, 0.999)
    assert len(names()) == 93
    with pytest.raises(ValueError, match="no preset 'wikitext103/espa'; did you mean 'wikitext103/e-spa'"):
        recipe("wikitext103/espa")
