"""Tables on mirrored networks: the embedding's rate is tuned too, deep arms follow a law, and headlines have seeds."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.paper import experiments
from skipless.paper.claims import NoSpike, NoWiderGap, Results, largest_rise
from skipless.paper.experiments import SCALES, Arm, PaperTable, Setting
from skipless.paper.mirrored import EMBEDDING_RATES
from skipless.paper.records import Record, ResultsFolder, Text
from skipless.paper.runs import Limits, Outcome, Run, Sweep, best_run, make_run, missing, outcome_of, run_key, total
from skipless.paper.tables import TABLES, as_json, gather, markdown
from skipless.paper.workers import Scheduler
from skipless.training.config import DEPTH_POWER, by_depth

INF = float("inf")
PLAIN = PaperTable(
    "plain",
    "one arm",
    "nowhere",
    (Arm("e-spa", "E-SPA", "wikitext103/e-spa"),),
    embedding_rates=EMBEDDING_RATES,
)


@pytest.fixture
def setting(text: Text) -> Setting:
    return Setting.of(SCALES["small"], text)


def bowl(rate: float, embedding: float):
    """A loss whose lowest point lies at these two rates."""

    def loss(run: Run) -> float:
        return 5.0 + abs(math.log10(run.rate / rate)) + abs(math.log10((run.embedding_rate or 1e-3) / embedding))

    return loss


def run_all(tables, setting: Setting, fake, loss, arms=()) -> dict[str, Record]:
    """Every run until none is missing, each with the loss that loss(run) says, in the order in which they come."""
    records: dict[str, Record] = {}
    while runs := missing(tables, setting, records, arms):
        records |= {run.key: fake(run, loss(run), embedding_rate=run.embedding_rate) for run in runs}
    return records


def test_the_embedding_is_tuned_at_the_best_rate(setting: Setting, fake) -> None:
    """First the rates at the middle embedding rate, then the other embedding rates at the best of them, then seeds."""
    records = run_all([PLAIN], setting, fake, bowl(3e-5, 5e-3))
    order = [(record.rate, record.embedding_rate, record.seed) for record in records.values()]
    assert order == [
        *((rate, 5e-3, 0) for rate in (2e-5, 3e-5, 5e-5)),
        (3e-5, 3e-3, 0),
        (3e-5, 1e-2, 0),
        (3e-5, 5e-3, 1),
    ]
    outcome = outcome_of(PLAIN, PLAIN.arms[0], setting, records)
    assert (outcome.best, outcome.embeddings.best) == (3e-5, 5e-3)
    assert not outcome.rates.edge
    assert not outcome.embeddings.edge
    assert sorted(outcome.runs[1.0]) == [0, 1]
    assert total(PLAIN, setting) == len(records)


@pytest.mark.parametrize(
    ("embedding", "tried", "edge"),
    [
        (2e-2, [3e-3, 5e-3, 1e-2, 2e-2, 3e-2], False),
        (1e-3, [5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2], False),
        (1.0, [3e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2], True),
    ],
)
def test_embedding_rates_are_added_beyond_the_edge(setting: Setting, fake, embedding, tried, edge) -> None:
    records = run_all([PLAIN], setting, fake, bowl(3e-5, embedding))
    outcome = outcome_of(PLAIN, PLAIN.arms[0], setting, records)
    assert list(outcome.embeddings.tried) == tried
    assert outcome.embeddings.edge is edge
    assert outcome.embeddings.best == min(tried, key=lambda rate: abs(math.log(rate / embedding)))
    at_best = [record for record in records.values() if record.seed]
    assert {(record.rate, record.embedding_rate) for record in at_best} == {(3e-5, outcome.embeddings.best)}


def test_no_embedding_rate_is_added_for_less_than_seeds_differ_by(setting: Setting, fake) -> None:
    flat = {3e-3: 5.5, 5e-3: 5.005, 1e-2: 5.0}
    records = run_all([PLAIN], setting, fake, lambda run: flat[run.embedding_rate] + abs(math.log(run.rate / 3e-5)))
    outcome = outcome_of(PLAIN, PLAIN.arms[0], setting, records)
    assert list(outcome.embeddings.tried) == [3e-3, 5e-3, 1e-2]
    assert outcome.embeddings.best == 1e-2
    assert not outcome.embeddings.edge


def test_the_best_pair_has_the_lowest_loss_of_all(setting: Setting, fake) -> None:
    """Also where the middle embedding rate diverges at some rates, and other embedding rates at the best one."""
    lost = {(5e-5, 5e-3), (3e-5, 1e-2)}
    plain = bowl(5e-5, 5e-3)
    loss = lambda run: INF if (run.rate, run.embedding_rate) in lost else plain(run)  # noqa: E731
    records = run_all([PLAIN], setting, fake, loss)
    outcome = outcome_of(PLAIN, PLAIN.arms[0], setting, records)
    best = min((record for record in records.values() if not record.seed), key=lambda record: record.train_loss)
    assert (outcome.best, outcome.embeddings.best) == (best.rate, best.embedding_rate) == (3e-5, 5e-3)


def test_an_arm_that_diverges_at_every_rate_tunes_no_embedding(setting: Setting, fake) -> None:
    records = run_all([PLAIN], setting, fake, lambda _: INF)
    outcome = outcome_of(PLAIN, PLAIN.arms[0], setting, records)
    assert outcome.failed
    assert {record.embedding_rate for record in records.values()} == {5e-3}


def test_one_rate_tunes_nothing(text: Text, fake) -> None:
    records = run_all([PLAIN], Setting.of(SCALES["small"], text, rates=1), fake, bowl(3e-5, 1.0))
    assert {(record.rate, record.embedding_rate) for record in records.values()} == {(3e-5, 5e-3)}
    setting = Setting.of(SCALES["small"], text, rates=1)
    assert total(PLAIN, setting) == len(records) == 2
    assert "The embedding's rate is 0.005 for all and was not tuned." in markdown(gather(PLAIN, setting, records))


def test_an_unfinished_embedding_sweep_names_no_best(setting: Setting, fake) -> None:
    records = {run.key: fake(run, bowl(3e-5, 5e-3)(run)) for run in missing([PLAIN], setting, {})}
    outcome = outcome_of(PLAIN, PLAIN.arms[0], setting, records)
    assert outcome.best is None
    assert not outcome.failed
    assert [run.embedding_rate for run in outcome.missing] == [3e-3, 1e-2]
    with pytest.raises(ValueError, match="e-spa has no best rate yet"):
        best_run(PLAIN, outcome, setting)
    assert "(sweep: 3 of 5)" in markdown(gather(PLAIN, setting, records))


def test_the_page_shows_both_rates(setting: Setting, fake) -> None:
    found = gather(PLAIN, setting, run_all([PLAIN], setting, fake, bowl(3e-5, 1.0)))
    page, data = markdown(found), as_json(found)
    assert "| arm | rate, embedding's rate: loss |" in page
    assert "3e-05, 0.005: 7.301; 5e-05, 0.005: 7.523; 3e-05, 0.003: 7.523; 3e-05, 0.01: 7.000" in page
    assert "| 3e-05, embedding 0.05 (at the edge) |" in page
    assert "at the best rate the embedding's is then tuned by the same rule over 0.003, 0.005, 0.01" in page
    assert list(data["embedding_sweeps"]["e-spa"]) == ["0.003", "0.005", "0.01", "0.02", "0.03", "0.05"]
    assert json.loads(json.dumps(data)) == data
    alone = dataclasses.replace(PLAIN, embedding_rates=(1e-2,))
    assert "The embedding's rate is 0.01 for all and was not tuned." in markdown(gather(alone, setting, {}))


def test_items_without_embedding_rates_are_as_before(setting: Setting, fake) -> None:
    """Same runs, same keys, one sentence about it; a record of either kind of table serves both."""
    plain, scale, text = dataclasses.replace(PLAIN, embedding_rates=()), setting.scale, setting.text
    runs = missing([plain], setting, {})
    assert {run.embedding_rate for run in runs} == {None}
    assert {run.experiment.optimizer.embedding_rate for run in runs} == {1e-3}
    named = make_run(PLAIN, PLAIN.arms[0], setting, 3e-5, embedding_rate=1e-3)
    assert named.key == make_run(plain, plain.arms[0], setting, 3e-5).key
    other = PLAIN.arms[0].experiment(scale, text, 3e-5, embedding_rate=5e-3)
    assert run_key(other, text) != named.key
    words = "The embedding's rate is 0.001 for all and was not tuned. Tuned, networks end 0.3 to 0.5 nats lower"
    page = markdown(gather(plain, setting, {}))
    assert words in page
    assert page.count("embedding") == 1
    assert "embedding_sweeps" not in as_json(gather(plain, setting, {}))
    assert missing([plain], setting, {})[0].describe() == "plain: e-spa, rate 2e-05, seed 0"
    assert missing([PLAIN], setting, {})[0].describe() == "plain: e-spa, rate 2e-05, embedding 0.005, seed 0"


def test_old_records_are_read(setting: Setting, fake) -> None:
    record = fake(missing([PLAIN], setting, {})[0], 5.0)
    old = {name: value for name, value in record.to_json().items() if name != "embedding_rate"}
    assert Record.from_json(old).embedding_rate is None
    new = dataclasses.replace(record, embedding_rate=5e-3)
    assert Record.from_json(new.to_json()) == new


@pytest.mark.parametrize("tried", [(3e-3, 1e-2), (3e-3, 5e-3), (1e-3, 5e-3, 1e-2), (1e-2, 5e-3, 3e-3)])
def test_embedding_rates_are_neighbours(tried: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"they must be an odd number of neighbours among the rates .* such as"):
        PaperTable("x", "x", "x", embedding_rates=tried)
    with pytest.raises(ValueError, match=r"the nearest is 0\.005"):
        PaperTable("x", "x", "x", embedding_rates=(6e-3,))


def test_the_items_are_in_the_catalogue_with_their_runs(setting: Setting) -> None:
    """`reproduce --list` shows what is in it."""
    runs = {name: total(table, setting) for name, table in TABLES.items() if name.startswith("mirrored")}
    assert runs == {
        "mirrored-factors": 6 * 3,
        "mirrored": 16 * (3 + 2) + 10 * 2 + 6 * 1 + 15 + 16,  # tuning, seeds, one more length each, paces
        "mirrored-longer": 5 * (3 + 2 + 2 + 1) + 2,
        "mirrored-long": 5 * (3 + 1 + 1),
        "mirrored-depth": 2 * (3 + 2 + 1) + 9 * 2,
        "mirrored-readers": 6 * (3 + 2 + 2 + 1),
        "mirrored-others": 2 * (3 + 2 + 2) + 3 * (3 + 2 + 1),
    }


def test_the_law_over_depth() -> None:
    """depth·rate is constant, to the three digits that are kept."""
    assert DEPTH_POWER == 1.0
    assert [by_depth(2e-3, depth) for depth in (36, 72, 108, 216)] == [2e-3, 1e-3, 6.67e-4, 3.33e-4]
    assert by_depth(1e-2, 72, at=18) == 2.5e-3
    assert by_depth(1e-2, 216, power=0.0) == 1e-2
    assert by_depth(1e-2, 144, power=1.5) == 1.25e-3


def test_long_runs_have_rates_by_the_law_over_steps(text: Text, fake) -> None:
    """Tuned over 2,000 steps; eight times as many have half the rate and half the embedding's."""
    table, medium = TABLES["mirrored-long"], Setting.of(SCALES["medium"], text)
    assert [experiments.by_steps(2e-3, multiple, 1 / 3) for multiple in (1, 3, 8)] == [2e-3, 1.39e-3, 1e-3]
    assert experiments.by_steps(2e-3, 8.0, 0.0) == 2e-3
    records = run_all([table], medium, fake, bowl(2e-3, 1e-2))
    for arm in table.arms:
        runs = outcome_of(table, arm, medium, records).runs
        assert {multiple: (run[0].rate, run[0].embedding_rate) for multiple, run in runs.items()} == {
            1.0: (2e-3, 1e-2),
            8.0: (1e-3, 5e-3),
        }
    assert "| 16000 |" in (page := markdown(gather(table, medium, records)))
    assert "| 0.001, embedding 0.005 |" in page


def test_deep_arms_take_their_rates_from_the_shallow_ones(setting: Setting, fake) -> None:
    table = TABLES["mirrored-depth"]
    waiting = outcome_of(table, table.arm("mirrored-gain/216"), setting, {})
    assert {run.arm for run in waiting.missing} == {"mirrored-gain/36"}
    assert not waiting.failed
    records = run_all([table], setting, fake, bowl(1e-3, 2e-2))
    found = {arm.name: outcome_of(table, arm, setting, records) for arm in table.arms}
    assert {name: (outcome.best, outcome.embeddings.best, len(outcome.swept)) for name, outcome in found.items()} == {
        "pre-ln/36": (1e-3, 2e-2, 10),
        "mirrored-gain/36": (1e-3, 2e-2, 8),
        "pre-ln/72": (5e-4, 2e-2, 1),
        "mirrored-gain/72": (5e-4, 2e-2, 1),
        "pre-ln/108": (3.33e-4, 2e-2, 1),
        "mirrored-gain/108": (3.33e-4, 2e-2, 1),
        "pre-ln/216": (1.67e-4, 2e-2, 1),
        "mirrored-gain/216": (1.67e-4, 2e-2, 1),
        "pre-ln-constant/72": (1e-3, 2e-2, 1),
        "pre-ln-constant/108": (1e-3, 2e-2, 1),
        "pre-ln-constant/216": (1e-3, 2e-2, 1),
    }
    assert all(sorted(outcome.runs[1.0]) == [0, 1] for outcome in found.values())
    page = markdown(gather(table, setting, records))
    assert "Deeper arms are not tuned: they take the rates of the shallowest by a law over depth." in page
    assert "| | 36 | 72 | 108 | 216 |" in page.replace("|  |", "| |")


def test_a_deep_arm_alone_tunes_the_one_that_it_follows(setting: Setting, fake) -> None:
    table = TABLES["mirrored-depth"]
    records = run_all([table], setting, fake, bowl(2e-3, 5e-3), ("mirrored-gain/108",))
    assert {record.arm for record in records.values()} == {"mirrored-gain/36", "mirrored-gain/108"}
    assert {record.seed for record in records.values() if record.arm == "mirrored-gain/36"} == {0}


def test_a_deep_arm_fails_with_the_one_that_it_follows(setting: Setting, fake) -> None:
    table = TABLES["mirrored-depth"]
    records = run_all([table], setting, fake, lambda run: INF if "mirrored" in run.arm else bowl(1e-2, 5e-3)(run))
    assert outcome_of(table, table.arm("mirrored-gain/216"), setting, records).failed


def test_who_an_arm_follows_must_be_there() -> None:
    arm = Arm("deep", "deep", "wikitext103/e-spa", follows="shallow")
    with pytest.raises(ValueError, match="arm 'deep' follows 'shallow'; it must be one of e-spa"):
        PaperTable("x", "x", "x", (*PLAIN.arms, arm))


def test_headline_arms_have_three_seeds(text: Text) -> None:
    table, usual = TABLES["mirrored"], Setting.of(SCALES["small"], text)
    three = [arm.name for arm in table.arms if usual.seeds_of(arm) == 3]
    assert three == [
        f"{kind}/{way}"
        for kind in ("pre-ln", "mirrored", "mirrored-identity", "mirrored-gain", "mirrored-wider")
        for way in ("adam", "muon")
    ]
    asked, tiny = Setting.of(SCALES["small"], text, seeds=1), Setting.of(SCALES["tiny"], text)
    assert {setting.seeds_of(arm) for setting in (asked, tiny) for arm in table.arms} == {1}
    assert {usual.seeds_of(arm) for arm in TABLES["mirrored-factors"].arms} == {1}


def test_items_on_mirrored_networks_share_their_runs(setting: Setting, fake) -> None:
    """After `mirrored`, what is left of the others is what they are about."""
    records = run_all([TABLES["mirrored"]], setting, fake, bowl(1e-3, 5e-3))
    longer = {(run.arm, run.multiple) for run in missing([TABLES["mirrored-longer"]], setting, records)}
    assert longer <= {(arm.name, 3.0) for arm in TABLES["mirrored-longer"].arms}
    assert not any(run.arm.endswith("/36") for run in missing([TABLES["mirrored-depth"]], setting, records))
    others = {run.arm for run in missing([TABLES["mirrored-others"]], setting, records)}
    assert others == {"pre-ln-mirrored/muon", "u-spa-mirrored/muon", "v-skipinit-mirrored/muon"}


def test_what_the_arms_of_mirrored_are(setting: Setting) -> None:
    scale, text = setting.scale, setting.text
    tables = [table for table in TABLES.values() if not table.on_images]
    arms = {arm.name: arm.experiment(scale, text, 1e-3) for table in tables for arm in table.arms}
    for way, slower in (("adam", 0.3), ("muon", 0.1), ("soap", 0.3)):
        trained, frozen, identity = (arms[f"mirrored{kind}/{way}"] for kind in ("", "-frozen", "-identity"))
        assert trained.model == frozen.model
        assert {trained.model.mlp_init, identity.model.mlp_init} == {"mirrored"}
        assert (trained.model.value_output, identity.model.value_output) == ("trained", "identity")
        assert identity.model.vanilla
        assert identity.model.shaped_activation.base == "gelu"
        assert identity.model.scheme.gamma_final == 0.05
        found = trained.optimizer.rates
        assert [found[role] for role in ("query", "key", "value", "output", "up", "down")] == pytest.approx(
            [3e-3, 3e-3, 1e-3 * slower, 1e-3 * slower, 5e-4, 5e-4]
        )
        assert (frozen.optimizer.rates["value"], frozen.optimizer.rates["output"]) == (0.0, 0.0)
    gain, wider, pre_ln = (arms[f"{kind}/muon"] for kind in ("mirrored-gain", "mirrored-wider", "pre-ln"))
    assert gain.model == arms["mirrored-identity/muon"].model.replace(bias_gain=True)
    assert wider.model == gain.model.replace(hidden=5 * gain.model.width)
    assert wider.model.matrix_parameters == pre_ln.model.matrix_parameters
    assert gain.optimizer.rates["gains"] == wider.optimizer.rates["gains"] == 1e-2
    assert arms["e-spa/muon"].model.mlp_init is None
    assert arms["v-skipinit-mirrored/muon"].optimizer.gain_rate == 1e-3
    assert arms["pre-ln/muon"].optimizer.role_rates == {}


def test_the_largest_rise() -> None:
    assert largest_rise([5.0, 4.0, 4.5, 3.0, 3.2]) == 0.5
    assert largest_rise([5.0, 4.0, 3.0]) == 0.0


def found(curve=(), losses=(5.0,)) -> Outcome:
    """An outcome with these final losses by seed, and this curve in each."""
    base = dict.fromkeys(("seed", "multiple", "rate", "seconds", "step_seconds", "jobs", "steps", "valid_loss"), 0)
    words = dict.fromkeys(("key", "item", "arm", "scale", "measure", "device", "torch", "commit", "time"), "")
    known = {**base, **words, "text": {}, "diverged_at": None, "curve": list(curve)}
    records = {seed: Record(**known, train_loss=loss) for seed, loss in enumerate(losses)}
    return Outcome(PLAIN.arms[0], Sweep(best=1e-3), runs={1.0: records})


def test_spikes_are_judged_by_the_curve() -> None:
    curves = {"calm": [[1, 5.0], [2, 4.0], [3, 4.05]], "wild": [[1, 5.0], [2, 4.0], [3, 4.5]]}
    results = Results({name: found(curve) for name, curve in curves.items()}, 7.5)
    assert NoSpike("calm").judge(results).mark == "pass"
    assert NoSpike("wild").judge(results).mark == "fail"
    assert NoSpike("none").judge(results).mark == "not run"
    assert NoSpike("calm").text() == "the training loss of calm never rises by more than 0.1"


@pytest.mark.parametrize(("deep", "mark"), [((5.2, 5.2), "pass"), ((5.21, 5.25), "pass"), ((5.3, 5.3), "fail")])
def test_a_gap_may_widen_by_what_seeds_differ_by(deep: tuple[float, float], mark: str) -> None:
    outcomes = {"a": found(losses=(4.6, 4.6)), "b": found(losses=(4.8, 4.8)), "c": found(losses=(5.0, 5.02))}
    results = Results({**outcomes, "d": found(losses=deep)}, 7.5)
    verdict = NoWiderGap(("c", "d"), ("a", "b")).judge(results)
    assert verdict.mark == mark, verdict
    assert NoWiderGap(("c", "e"), ("a", "b")).judge(results).mark == "not run"


@pytest.mark.parametrize("arm", ["mirrored/adam", "mirrored-identity/muon", "mirrored-frozen/muon"])
def test_an_arm_from_start_to_page(arm: str, tmp_path: Path) -> None:
    """At the smallest size, on a CPU: trained, recorded and shown."""
    lines = (f"{number} times {number} is {number**2}." for number in range(3000))
    (tmp_path / "text.txt").write_text("\n\n\n".join(lines))
    source = Preparation(str(tmp_path / "text.txt"), tokenizer=Bytes(), valid_fraction=0.2)
    prepare(source, tmp_path / "tokens", workers=1)
    setting = Setting.of(SCALES["tiny"], Text.read(tmp_path / "tokens"))
    folder = ResultsFolder(tmp_path / "results", "tiny")
    assert not Scheduler([TABLES["mirrored"]], setting, folder, Limits(device="cpu"), arms=(arm,)).work()
    records = [record for record in folder.records.values() if not record.measure]
    assert [(record.arm, record.embedding_rate, record.diverged) for record in records] == [(arm, 5e-3, False)]
    assert [step for step, _ in records[0].curve] == [1, 2, 3]
    assert abs(records[0].train_loss - math.log(256)) < 0.5  # three steps from a start that knows nothing
    page = markdown(gather(TABLES["mirrored"], setting, folder.records))
    assert f"{records[0].rate:g}, embedding 0.005" in page
