"""Items and arms: every one can be built at every size, shares runs with others, and states what it expects."""

from dataclasses import replace

import pytest

from skipless.model.transformer import attention_shapes
from skipless.paper.catalogue import ITEMS, check_arms, items_named
from skipless.paper.experiments import (
    SCALES,
    Item,
    Setting,
    Text,
    by_depth,
    expected,
    kind,
    make_job,
    run_key,
    scale_named,
)
from skipless.paper.runs import missing, total
from skipless.training.config import Experiment, OptimizerConfig

TRAINED = [item for item in ITEMS.values() if not item.kernels]
each_item = pytest.mark.parametrize("item", TRAINED, ids=lambda item: item.name)
each_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)


@each_item
@each_scale
def test_every_arm_is_an_experiment_at_every_size(item: Item, scale, text: Text) -> None:
    for arm in item.arms:
        experiment = arm.experiment(scale, text, arm.rates(scale, text, 1)[0], seed=2, multiple=arm.multiples[-1])
        assert Experiment.from_json(experiment.to_json()) == experiment
        assert len(attention_shapes(experiment.model)) == experiment.model.depth >= 32
        assert experiment.train.seed == 2
        assert experiment.train.checkpoint_every or arm.multiples[-1] == 1.0 or scale.name == "tiny"


@each_item
def test_arms_of_an_item_are_equal_but_for_what_they_compare(item: Item, text: Text) -> None:
    scale = SCALES["small"]
    rates = [by_depth(1e-3, arm.model(scale, text).depth, power=arm.depth_power) for arm in item.arms]
    experiments = [
        arm.experiment(scale, text, rate if arm.follows else 1e-3) for arm, rate in zip(item.arms, rates, strict=True)
    ]
    usual = scale.schedule(item.arms[0].corpus)
    schedules = {replace(usual, precision=arm.precision or usual.precision) for arm in item.arms}
    assert {experiment.train for experiment in experiments} == schedules
    assert len(schedules) == (2 if item.name == "rounding" else 1)
    assert {experiment.optimizer.embedding_rate for experiment in experiments} == {1e-3}
    assert len({run_key(experiment, text) for experiment in experiments}) == len(item.arms)


@each_item
def test_an_item_is_of_one_corpus(item: Item) -> None:
    """All its arms are trained on one text, and measured against one baseline."""
    assert len({arm.corpus for arm in item.arms}) == 1


@pytest.mark.parametrize(("name", "corpus", "ratio"), [("longer", "wikitext103", 4.5), ("c4-longer", "c4", 5.0)])
def test_longer_training_is_held_against_pre_ln_of_its_own_corpus(name: str, corpus: str, ratio: float) -> None:
    item = ITEMS[name]
    assert item.arm(item.baseline).preset == f"{corpus}/pre-ln"
    assert [printed.value for printed in item.arm("e-spa").printed if printed.quantity == "steps_ratio"] == [ratio]
    assert any("in at most 6 times its steps" in band.claim() for band in item.bands)


def test_query_key_has_every_start_of_section_3_3(text: Text) -> None:
    arms = {arm.name: arm.model(SCALES["small"], text) for arm in ITEMS["query-key"].arms}
    assert {model.query_key for model in arms.values()} == {"zero-query", "zero-key", "small"}
    assert [name for name, model in arms.items() if model.bias_gain] == ["bias-gain"]
    assert {arm.name for arm in ITEMS["query-key"].chosen(SCALES["small"])} == {"zero-query", "sigma-0.1", "sigma-1"}


def test_rounding_takes_its_runs_in_bfloat16_from_depth(text: Text) -> None:
    scale = SCALES["small"]
    for depth in (36, 72, 108):
        ours, theirs = ITEMS["rounding"].arm(f"e-spa-{depth}/bf16"), ITEMS["depth"].arm(f"e-spa-{depth}")
        assert run_key(ours.experiment(scale, text, 3e-5), text) == run_key(theirs.experiment(scale, text, 3e-5), text)
        assert ITEMS["rounding"].arm(f"e-spa-{depth}/fp16").experiment(scale, text, 3e-5).train.precision == "fp16"


def test_depth_steady_takes_its_plain_runs_from_depth(text: Text) -> None:
    scale = SCALES["small"]
    for depth in (72, 108):
        ours, theirs = (ITEMS[name].arm(f"e-spa-{depth}") for name in ("depth-steady", "depth"))
        assert run_key(ours.experiment(scale, text, 3e-5), text) == run_key(theirs.experiment(scale, text, 3e-5), text)
    slow = ITEMS["depth-steady"].arm("e-spa-108/slow-mlp").experiment(scale, text, 1e-3).optimizer
    assert (slow.rates["up"], slow.rates["down"], slow.rates["value"]) == (2e-4, 2e-4, 1e-3)


def test_the_paper_size_is_appendix_h(text: Text) -> None:
    scale = SCALES["paper"]
    wikitext = ITEMS["baselines"].arm("e-spa").experiment(scale, text, 3e-5)
    assert (wikitext.train.steps, wikitext.train.batch_size, wikitext.train.length) == (100_000, 16, 512)
    assert (wikitext.train.warmup, wikitext.optimizer.clip, wikitext.train.ema) == (4_000, 0.1, 0.01)
    assert wikitext.optimizer == OptimizerConfig(rate=3e-5, embedding_rate=2e-4)
    assert (wikitext.model.width, wikitext.model.depth, wikitext.model.heads) == (1024, 36, 8)
    c4 = ITEMS["c4"].arm("e-spa").experiment(scale, text, 3e-5)
    assert (c4.train.steps, c4.train.batch_size, c4.train.length) == (50_000, 8, 2048)
    assert (c4.model.depth, c4.optimizer.embedding_rate) == (32, 5e-4)


def test_parameter_counts(text: Text) -> None:
    """The paper's networks, and ours at one GPU's size: 12·d² a block and the embedding."""
    paper, small = SCALES["paper"], SCALES["small"]
    arm, deep = ITEMS["baselines"].arm("e-spa"), ITEMS["depth"].arm("e-spa-108")
    assert arm.model(paper, text).matrix_parameters == 36 * 12 * 1024**2 + 32_000 * 1024
    assert arm.model(small, text).matrix_parameters == 36 * 12 * 256**2 + 32_000 * 256
    assert deep.model(paper, text).matrix_parameters == 108 * 12 * 512**2 + 32_000 * 512
    assert deep.model(small, text).width == 128
    assert deep.model(small, text).heads == 2


def test_a_scheme_takes_the_repeat_rate_of_the_text(text: Text) -> None:
    letters = Text("letters", 256, 0.047, 3.2, 10**6, "ff")
    model = ITEMS["baselines"].arm("e-spa").model(SCALES["small"], letters)
    assert model.scheme.repeat_rate == 0.047
    assert model.vocab_size == 256
    assert ITEMS["baselines"].arm("e-spa").model(SCALES["small"], text).scheme.repeat_rate == 0.008


def test_items_share_runs(text: Text) -> None:
    setting = Setting.of(SCALES["small"], text)
    baselines, positions, orthogonal = (ITEMS[name] for name in ("baselines", "positions", "orthogonal"))
    alone = [len(missing([item], setting, {})) for item in (baselines, positions, orthogonal)]
    together = missing([baselines, positions, orthogonal], setting, {})
    # E-SPA, U-SPA and V-SkipInit with RoPE are in two items, and vanilla E-SPA in all three
    assert len(together) == sum(alone) - 4 * setting.rates
    assert len({job.key for job in together}) == len(together)


def test_the_key_is_of_what_results_depend_on(text: Text) -> None:
    import dataclasses

    arm, scale = ITEMS["baselines"].arm("e-spa"), SCALES["small"]
    experiment = arm.experiment(scale, text, 3e-5)
    key = run_key(experiment, text)
    elsewhere = dataclasses.replace(text, folder="/elsewhere")
    assert run_key(arm.experiment(scale, elsewhere, 3e-5), elsewhere) == key
    assert run_key(dataclasses.replace(experiment, name="other"), text) == key
    faster = dataclasses.replace(experiment.train, compile=False, impl="sdpa", log_every=7, checkpoint_every=3)
    assert run_key(dataclasses.replace(experiment, train=faster), text) == key
    shaped = experiment.model.shaped_activation
    nearly = dataclasses.replace(shaped, input_scale=shaped.input_scale * (1 + 1e-12))
    assert run_key(dataclasses.replace(experiment, model=experiment.model.replace(activation=nearly)), text) == key
    others = [
        arm.experiment(scale, text, 2e-5),
        arm.experiment(scale, text, 3e-5, seed=1),
        arm.experiment(scale, text, 3e-5, multiple=2.0),
        arm.experiment(scale, text, 3e-5, measure="probes"),
        arm.experiment(SCALES["paper"], text, 3e-5),
    ]
    assert len({key, *(run_key(other, text) for other in others)}) == 6
    assert run_key(experiment, dataclasses.replace(text, fingerprint="other")) != key
    assert run_key(experiment, text, "tasks") != key


@each_item
def test_equal_tuning(item: Item, text: Text) -> None:
    """Every arm has the same number of rates, around a rate stated for its kind of network and optimiser."""
    scale = SCALES["small"]
    for arm in item.arms:
        grid = arm.rates(scale, text, 3)
        assert len(grid) == 3
        assert grid[1] == expected(arm.model(scale, text), arm.optimizer)


def test_kinds_of_networks(text: Text) -> None:
    scale = SCALES["small"]
    arms = {arm.name: arm for item in TRAINED for arm in item.arms}
    kinds = {
        name: kind(arms[name].model(scale, text))
        for name in ("e-spa", "pre-ln", "mlp-0.97", "skipinit", "stable", "mirrored/muon", "pre-ln-mirrored/muon")
    }
    assert kinds == {
        "e-spa": "skipless",
        "pre-ln": "residual",
        "mlp-0.97": "one-skip",
        "skipinit": "weighted",
        "stable": "weighted",
        "mirrored/muon": "mirrored",
        "pre-ln-mirrored/muon": "residual",
    }


@each_item
def test_every_item_states_its_bands_about_its_own_arms(item: Item) -> None:
    assert item.bands
    known = {arm.name for arm in item.chosen(SCALES["small"])}
    for band in item.bands:
        named = [value for value in vars(band).values() if isinstance(value, str)]
        pairs = [name for value in vars(band).values() if isinstance(value, tuple) for name in value]
        arms = {name.partition("@")[0] for name in (*named, *pairs)} - {*item.quantities, "valid_loss", "train_loss"}
        assert arms <= known, f"{band} names an arm that is not run at this size"
        assert band.claim()


def test_few_arms_at_the_size_of_one_gpu(text: Text) -> None:
    scale = SCALES["small"]
    assert all(len(item.chosen(scale)) <= 6 for item in TRAINED if item.name not in ("mirrored", "mirrored-depth"))
    assert all(item.chosen(SCALES["paper"]) == item.arms for item in TRAINED)
    assert total(ITEMS["baselines"], Setting.of(scale, text)) == 5 * (3 + 1)


def test_arms_can_be_named() -> None:
    item, scale = ITEMS["baselines"], SCALES["small"]
    assert [arm.name for arm in item.chosen(scale, ("skipless", "e-spa"))] == ["e-spa", "skipless"]
    assert item.chosen(scale, ("all",)) == item.arms
    check_arms([item], ("skipless", "all"))
    with pytest.raises(ValueError, match="--arms names 'e-sp', which no chosen item has; nearest: e-spa"):
        check_arms([item], ("e-sp",))


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ValueError, match="there is no item 'baseline'; nearest: baselines"):
        items_named(["baseline"])
    with pytest.raises(ValueError, match="name an item, such as baselines"):
        items_named([])
    with pytest.raises(ValueError, match=r"--scale is 'smal'; did you mean small\?"):
        scale_named("smal")
    assert [item.name for item in items_named(["depth", "all", "depth"])][:2] == ["depth", "kernels"]
    assert len(items_named(["all"])) == len(ITEMS) == 27


def test_two_arms_of_one_name_are_refused() -> None:
    arm = ITEMS["baselines"].arms[0]
    with pytest.raises(ValueError, match="two arms 'e-spa'"):
        Item("x", "x", "x", (arm, arm))


def test_a_pace_is_short_and_alone(text: Text) -> None:
    item = ITEMS["optimisers"]
    job = make_job(item, item.arms[0], Setting.of(SCALES["small"], text), 1e-3, measure="pace")
    assert job.exclusive
    assert job.experiment.train.steps == 100
    assert job.experiment.train.eval_every == 0
