"""Tables and arms: every one can be built at every size, shares runs with others, and states what it expects."""

from dataclasses import replace
from importlib import import_module

import pytest

from skipless.cli.reproduce import check_arms, check_scale, curves, tables_named
from skipless.model.config import attention_shapes
from skipless.model.quantise import QUANTISATIONS
from skipless.paper.claims import Later
from skipless.paper.experiments import SCALES, PaperTable, Setting, by_steps, expected, kind
from skipless.paper.measures import FORMATS
from skipless.paper.records import Text
from skipless.paper.runs import make_run, missing, outcomes, run_key, total
from skipless.paper.tables import TABLES
from skipless.training.config import Experiment, OptimizerConfig, by_depth

TRAINED = [table for table in TABLES.values() if not table.kernels and not table.on_images]
each_table = pytest.mark.parametrize("table", TRAINED, ids=lambda table: table.name)
each_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)


@each_table
@each_scale
def test_every_arm_is_an_experiment_at_every_size(table: PaperTable, scale, text: Text) -> None:
    for arm in table.arms:
        experiment = arm.experiment(scale, text, arm.rates(scale, text, 1)[0], seed=2, multiple=arm.step_multiples[-1])
        assert Experiment.from_json(experiment.to_json()) == experiment
        assert len(attention_shapes(experiment.model)) == experiment.model.depth >= 27
        assert experiment.train.seed == 2
        assert experiment.train.checkpoint_every or arm.step_multiples[-1] == 1.0 or scale.name == "tiny"


@each_table
def test_arms_of_an_item_are_equal_but_for_what_they_compare(table: PaperTable, text: Text) -> None:
    scale = SCALES["small"]
    depths = [by_depth(1e-3, arm.model(scale, text).depth, power=arm.depth_power) for arm in table.arms]
    rates = [
        by_steps(rate if arm.follows else 1e-3, arm.step_multiples[-1], arm.steps_power)
        for arm, rate in zip(table.arms, depths, strict=True)
    ]
    experiments = [arm.experiment(scale, text, rate) for arm, rate in zip(table.arms, rates, strict=True)]
    usual = scale.schedule(table.arms[0].corpus)
    schedules = {replace(usual, precision=arm.precision or usual.precision) for arm in table.arms}
    assert {experiment.train for experiment in experiments} == schedules
    assert len(schedules) == (2 if table.name == "rounding" else 1)
    assert {experiment.optimizer.embedding_rate for experiment in experiments} == {1e-3}
    assert len({run_key(experiment, text) for experiment in experiments}) == len(table.arms)


@each_table
def test_an_item_is_of_one_corpus(table: PaperTable) -> None:
    """All its arms are trained on one text, and measured against one baseline."""
    assert len({arm.corpus for arm in table.arms}) == 1


@pytest.mark.parametrize(("name", "corpus", "ratio"), [("longer", "wikitext103", 4.5), ("c4-longer", "c4", 5.0)])
def test_longer_training_is_held_against_pre_ln_of_its_own_corpus(name: str, corpus: str, ratio: float) -> None:
    table = TABLES[name]
    assert table.arm(table.baseline).preset == f"{corpus}/pre-ln"
    assert [printed.value for printed in table.arm("e-spa").printed if printed.quantity == "steps_ratio"] == [ratio]
    assert any("in at most 6 times its steps" in claim.text() for claim in table.claims)


def test_query_key_has_every_start_of_section_3_3(text: Text) -> None:
    arms = {arm.name: arm.model(SCALES["small"], text) for arm in TABLES["query-key"].arms}
    assert {model.query_key for model in arms.values()} == {"zero-query", "zero-key", "small"}
    assert [name for name, model in arms.items() if model.bias_gain] == ["bias-gain"]
    assert {arm.name for arm in TABLES["query-key"].chosen(SCALES["small"])} == {"zero-query", "sigma-0.1", "sigma-1"}


def test_rounding_takes_its_runs_in_bfloat16_from_depth(text: Text) -> None:
    scale = SCALES["small"]
    for depth in (36, 72, 108):
        ours, theirs = TABLES["rounding"].arm(f"e-spa-{depth}/bf16"), TABLES["depth"].arm(f"e-spa-{depth}")
        assert run_key(ours.experiment(scale, text, 3e-5), text) == run_key(theirs.experiment(scale, text, 3e-5), text)
        assert TABLES["rounding"].arm(f"e-spa-{depth}/fp16").experiment(scale, text, 3e-5).train.precision == "fp16"


def test_depth_steady_takes_its_plain_runs_from_depth(text: Text) -> None:
    scale = SCALES["small"]
    for depth in (72, 108):
        ours, theirs = (TABLES[name].arm(f"e-spa-{depth}") for name in ("depth-steady", "depth"))
        assert run_key(ours.experiment(scale, text, 3e-5), text) == run_key(theirs.experiment(scale, text, 3e-5), text)
    slow = TABLES["depth-steady"].arm("e-spa-108/slow-mlp").experiment(scale, text, 1e-3).optimizer
    assert (slow.rates["up"], slow.rates["down"], slow.rates["value"]) == (2e-4, 2e-4, 1e-3)


def test_the_paper_size_is_appendix_h(text: Text) -> None:
    scale = SCALES["paper"]
    wikitext = TABLES["baselines"].arm("e-spa").experiment(scale, text, 3e-5)
    assert (wikitext.train.steps, wikitext.train.batch_size, wikitext.train.length) == (100_000, 16, 512)
    assert (wikitext.train.warmup, wikitext.optimizer.clip, wikitext.train.ema) == (4_000, 0.1, 0.01)
    assert wikitext.optimizer == OptimizerConfig(rate=3e-5, embedding_rate=2e-4)
    assert (wikitext.model.width, wikitext.model.depth, wikitext.model.heads) == (1024, 36, 8)
    c4 = TABLES["c4"].arm("e-spa").experiment(scale, text, 3e-5)
    assert (c4.train.steps, c4.train.batch_size, c4.train.length) == (50_000, 8, 2048)
    assert (c4.model.depth, c4.optimizer.embedding_rate) == (32, 5e-4)


def test_parameter_counts(text: Text) -> None:
    """The paper's networks, and ours at one GPU's size: 12·d² a block and the embedding."""
    paper, small = SCALES["paper"], SCALES["small"]
    arm, deep = TABLES["baselines"].arm("e-spa"), TABLES["depth"].arm("e-spa-108")
    assert arm.model(paper, text).matrix_parameters == 36 * 12 * 1024**2 + 32_000 * 1024
    assert arm.model(small, text).matrix_parameters == 36 * 12 * 256**2 + 32_000 * 256
    assert deep.model(paper, text).matrix_parameters == 108 * 12 * 512**2 + 32_000 * 512
    assert deep.model(small, text).width == 128
    assert deep.model(small, text).heads == 2


def test_a_scheme_takes_the_repeat_rate_of_the_text(text: Text) -> None:
    letters = Text("letters", 256, 0.047, 3.2, 10**6, "ff")
    model = TABLES["baselines"].arm("e-spa").model(SCALES["small"], letters)
    assert model.scheme.repeat_rate == 0.047
    assert model.vocab_size == 256
    assert TABLES["baselines"].arm("e-spa").model(SCALES["small"], text).scheme.repeat_rate == 0.008


def test_narrow_networks_are_tried_at_larger_rates(text: Text) -> None:
    arm = TABLES["baselines"].arm("e-spa")
    assert arm.rates(SCALES["small"], text, 3) == (2e-5, 3e-5, 5e-5)
    assert arm.rates(SCALES["cpu"], text, 3) == (5e-5, 1e-4, 2e-4)  # 4 times 3e-5 is nearest to 1e-4
    assert replace(arm, rate=7e-5).rates(SCALES["cpu"], text, 3) == (7e-5,)


def test_items_share_runs(text: Text) -> None:
    setting = Setting.of(SCALES["small"], text)
    baselines, positions, orthogonal = (TABLES[name] for name in ("baselines", "positions", "orthogonal"))
    alone = [len(missing([table], setting, {})) for table in (baselines, positions, orthogonal)]
    together = missing([baselines, positions, orthogonal], setting, {})
    # E-SPA, U-SPA and V-SkipInit with RoPE are in two tables, and vanilla E-SPA in all three
    assert len(together) == sum(alone) - 4 * setting.rates
    assert len({run.key for run in together}) == len(together)


def test_the_key_is_of_what_results_depend_on(text: Text) -> None:
    import dataclasses

    arm, scale = TABLES["baselines"].arm("e-spa"), SCALES["small"]
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


@each_table
def test_equal_tuning(table: PaperTable, text: Text) -> None:
    """Every arm has the same number of rates, around a rate stated for its kind of network and optimiser."""
    scale = SCALES["small"]
    for arm in table.arms:
        grid = arm.rates(scale, text, 3)
        assert len(grid) == 3
        assert grid[1] == expected(arm.model(scale, text), arm.optimizer)


def test_kinds_of_networks(text: Text) -> None:
    scale = SCALES["small"]
    arms = {arm.name: arm for table in TRAINED for arm in table.arms}
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


@each_table
def test_every_item_states_its_claims_about_its_own_arms(table: PaperTable) -> None:
    assert table.claims
    known = {arm.name for arm in table.arms}
    for claim in (each.claim if isinstance(each, Later) else each for each in table.claims):
        named = [value for value in vars(claim).values() if isinstance(value, str)]
        pairs = [name for value in vars(claim).values() if isinstance(value, tuple) for name in value]
        arms = {name.partition("@")[0] for name in (*named, *pairs)} - {*table.quantities, "valid_loss", "train_loss"}
        assert arms <= known, f"{claim} names an arm that the table does not have"
        assert claim.text()


MANY = ("mirrored", "mirrored-depth", "low-bits", "blocks", "backwards")


def test_few_arms_at_the_size_of_one_gpu(text: Text) -> None:
    scale = SCALES["small"]
    assert all(len(table.chosen(scale)) <= 6 for table in TRAINED if table.name not in MANY)
    assert all(table.chosen(SCALES["paper"]) == table.arms for table in TRAINED)
    assert total(TABLES["baselines"], Setting.of(scale, text)) == 5 * (3 + 1)


def test_arms_can_be_named() -> None:
    table, scale = TABLES["baselines"], SCALES["small"]
    assert [arm.name for arm in table.chosen(scale, ("skipless", "e-spa"))] == ["e-spa", "skipless"]
    assert table.chosen(scale, ("all",)) == table.arms
    check_arms([table], ("skipless", "all"))
    with pytest.raises(ValueError, match="--arms names 'e-sp', which no chosen table has; did you mean 'e-spa'"):
        check_arms([table], ("e-sp",))


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ValueError, match="there is no table 'baseline'; did you mean 'baselines'"):
        tables_named(["baseline"])
    with pytest.raises(ValueError, match="name a table, such as baselines"):
        tables_named([])
    with pytest.raises(ValueError, match=r"--scale is 'smal'; did you mean 'small'"):
        check_scale(tables_named(["baselines"]), "smal")
    assert [table.name for table in tables_named(["depth", "all", "depth"])][:2] == ["depth", "kernels"]
    assert len(tables_named(["all"])) == len(TABLES) == 34


def test_low_bits_has_every_quantisation() -> None:
    assert tuple(QUANTISATIONS) == FORMATS
    assert {f"{name}_rise" for name in FORMATS} <= set(TABLES["low-bits"].quantities)


def test_the_catalogue_has_every_table_that_a_file_states() -> None:
    names = ("skipless", "skips", "extensions", "mirrored", "vision")
    files = {import_module(f"skipless.paper.{name}") for name in names}
    stated = [each.name for file in files for each in vars(file).values() if isinstance(each, PaperTable)]
    assert sorted(stated) == sorted(TABLES)
    assert all(TABLES[name].name == name for name in TABLES)
    with pytest.raises(KeyError):
        TABLES["table-1"]


def test_two_arms_of_one_name_are_refused() -> None:
    arm = TABLES["baselines"].arms[0]
    with pytest.raises(ValueError, match="two arms 'e-spa'"):
        PaperTable("x", "x", "x", (arm, arm))


def test_a_pace_is_short_and_alone(text: Text) -> None:
    table = TABLES["optimisers"]
    run = make_run(table, table.arms[0], Setting.of(SCALES["small"], text), 1e-3, measure="pace")
    assert run.exclusive
    assert run.experiment.train.steps == 100
    assert run.experiment.train.eval_every == 0


def drawn(name: str, text: Text, fake) -> list[dict]:
    table, setting, records = TABLES[name], Setting.of(SCALES["small"], text), {}
    while runs := missing([table], setting, records):
        records |= {run.key: fake(run, 6.0 - 0.1 * run.multiple + 0.02 * run.seed) for run in runs}
    known = outcomes(table, setting, records)
    return [curve for outcome in known.values() for curve in curves(outcome, setting.scale)]


def test_the_longest_length_is_drawn_beside_the_usual_one(text: Text, fake) -> None:
    found = {curve["label"]: curve for curve in drawn("longer", text, fake)}
    assert list(found) == ["Pre-LN", "E-SPA", "E-SPA, 5× the steps"]
    usual, longest = found["E-SPA"], found["E-SPA, 5× the steps"]
    assert (usual["name"], longest["name"]) == ("e-spa", "e-spa/×5")
    assert (usual["final"], longest["final"]) == ("5.91 ± 0.01", "5.50")
    assert len(usual["sweep"]) >= 3
    assert longest["sweep"] == {}
    assert len(usual["others"]) == 1


def test_the_step_ladder_is_not_drawn(text: Text, fake) -> None:
    labels = [curve["label"] for curve in drawn("optimisers", text, fake)]
    assert len(labels) == len(set(labels)) == 6
    assert not any("the steps" in label for label in labels)
