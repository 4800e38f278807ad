"""Rates, records, what is missing, and how many times the steps: functions of records that never cost a run."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.paper import experiments
from skipless.paper.experiments import SCALES, Setting
from skipless.paper.records import Record, ResultsFolder, Text, final_loss, losses_of, thinned
from skipless.paper.runs import Ratio, missing, next_multiple, outcome_of, steps_ratio
from skipless.paper.tables import TABLES

INF = float("inf")


@pytest.fixture
def setting(text: Text) -> Setting:
    return Setting.of(SCALES["small"], text)


def run_all(tables, setting: Setting, fake, loss, arms=(), known=None) -> dict[str, Record]:
    """Every run until none is missing, each with the loss that loss(run) says. known: runs of earlier calls."""
    records: dict[str, Record] = dict(known or {})
    while runs := missing(tables, setting, records, arms):
        for run in runs:
            records[run.key] = fake(run, loss(run))
    return records


def test_the_ladder() -> None:
    assert experiments.grid(3e-5, 3) == (2e-5, 3e-5, 5e-5)
    assert experiments.grid(1e-3, 3) == (5e-4, 1e-3, 2e-3)
    assert experiments.grid(5e-4, 4) == (3e-4, 5e-4, 1e-3, 2e-3)
    assert experiments.grid(1e-3, 1) == (1e-3,)
    assert set(experiments.grid(1e-3, 3)) < set(experiments.grid(1e-3, 5))
    with pytest.raises(ValueError, match=r"the rate 0.0004 is not of the form .* the nearest is 0.0005"):
        experiments.grid(4e-4, 3)
    with pytest.raises(ValueError, match="--rates is 0; every arm needs at least 1"):
        experiments.grid(1e-3, 0)


@given(st.sampled_from([f"{m}e{n}" for m in (1, 2, 3, 5) for n in range(-7, 1)]), st.integers(1, 9))
def test_grids_rise_and_hold_their_middle(middle: str, count: int) -> None:
    grid = experiments.grid(float(middle), count)
    assert len(grid) == count
    assert list(grid) == sorted(grid)
    assert float(middle) in grid
    assert all(1.4 < high / low < 2.1 for low, high in itertools.pairwise(grid))


def test_one_more_beyond_the_edge() -> None:
    assert experiments.beyond({2e-5: 5.0, 3e-5: 4.0, 5e-5: 4.5}) is None
    assert experiments.beyond({2e-5: 4.0, 3e-5: 4.1, 5e-5: INF}) == 1e-5
    assert experiments.beyond({2e-5: 4.0, 3e-5: 3.9, 5e-5: 3.8}) == 1e-4
    assert experiments.beyond({2e-5: INF, 3e-5: INF, 5e-5: INF}) == 1e-5
    assert experiments.beyond({3e-5: 4.0}) is None
    assert experiments.beyond({2e-5: 4.005, 3e-5: 4.2, 5e-5: 4.0}) == 1e-4
    assert experiments.beyond({2e-5: 4.1, 3e-5: 4.005, 5e-5: 4.0}) is None  # no better than its neighbour


def test_first_sweeps_then_seeds_at_the_best_rate(setting: Setting, fake) -> None:
    table = TABLES["baselines"]
    runs = missing([table], setting, {})
    assert [run.arm for run in runs[:6]] == ["e-spa"] * 3 + ["pre-ln"] * 3  # arms of one network stay together
    assert {(run.seed, run.multiple, run.stage) for run in runs} == {(0, 1.0, 0)}
    records = {run.key: fake(run, 5.0 + abs(math.log(run.rate / 3e-5))) for run in runs if run.arm == "e-spa"}
    seeds = [run for run in missing([table], setting, records) if run.arm == "e-spa"]
    assert [(run.rate, run.seed, run.stage) for run in seeds] == [(3e-5, 1, 1)]


def test_a_best_rate_at_the_edge_adds_rates_and_three_at_most(setting: Setting, fake) -> None:
    table = TABLES["baselines"]
    records = run_all([table], setting, fake, lambda run: 5.0 - math.log10(run.rate))
    outcome = outcome_of(table, table.arm("e-spa"), setting, records)
    assert list(outcome.rates.tried) == [2e-5, 3e-5, 5e-5, 1e-4, 2e-4, 3e-4]
    assert (outcome.best, outcome.rates.edge) == (3e-4, True)
    assert sorted(outcome.runs[1.0]) == [0, 1]
    assert all(len(outcome_of(table, arm, setting, records).rates.tried) == 6 for arm in table.chosen(setting.scale))


def test_rates_are_added_until_the_best_lies_inside(setting: Setting, fake) -> None:
    table = TABLES["baselines"]
    records = run_all([table], setting, fake, lambda run: 5.0 + abs(math.log10(run.rate / 1e-4)))
    outcome = outcome_of(table, table.arm("e-spa"), setting, records)
    assert list(outcome.rates.tried) == [2e-5, 3e-5, 5e-5, 1e-4, 2e-4]
    assert (outcome.best, outcome.rates.edge) == (1e-4, False)


def test_divergence_is_a_result(setting: Setting, fake) -> None:
    table = TABLES["baselines"]
    records = run_all([table], setting, fake, lambda run: INF if run.arm == "skipless-ln" or run.rate > 3e-5 else 6.0)
    lost = outcome_of(table, table.arm("skipless-ln"), setting, records)
    assert lost.failed
    assert math.isinf(lost.sample("train_loss").mean)
    kept = outcome_of(table, table.arm("e-spa"), setting, records)
    assert kept.best == 2e-5  # the lowest of two equal ones
    assert not kept.rates.edge
    assert not missing([table], setting, records)


def test_more_seeds_than_asked_for_are_seen(setting: Setting, fake, text: Text) -> None:
    table = TABLES["baselines"]
    three = Setting.of(SCALES["small"], text, seeds=3)
    records = run_all([table], three, fake, lambda run: 5.0 + 0.1 * run.seed)
    sample = outcome_of(table, table.arm("e-spa"), setting, records).sample("train_loss")
    assert sample.values == (5.0, 5.1, 5.2)
    assert sample.mean == pytest.approx(5.1)
    assert sample.half_range == pytest.approx(0.1)


def test_longer_runs_come_at_the_best_rate(setting: Setting, fake) -> None:
    table = TABLES["longer"]
    records = run_all([table], setting, fake, lambda run: 6.0 / run.multiple**0.1)
    runs = [(record.arm, record.multiple) for record in records.values() if record.multiple != 1.0]
    assert runs == [("e-spa", 2.0), ("e-spa", 3.0), ("e-spa", 5.0)]
    assert outcome_of(table, table.arm("e-spa"), setting, records).sample("train_loss", 5.0) is not None


def test_what_is_measured_is_run_at_the_best_rate_only(setting: Setting, fake) -> None:
    table = TABLES["training-kernels"]
    records = run_all([table], setting, fake, lambda _: 6.0)
    assert [(r.measure, r.seed) for r in records.values() if r.measure] == [("probes", 0), ("probes", 1)]


def test_the_ladder_of_lengths_stops_when_the_baseline_is_reached(setting: Setting, fake) -> None:
    """Arms behind are trained longer until they reach Pre-LN + Adam, and Pre-LN with their own optimiser; arms ahead
    shorter until they do not."""
    table = TABLES["optimisers"]
    starts = {"pre-ln/adam": 5.0, "e-spa/adam": 6.5, "e-spa/muon": 5.3, "pre-ln/muon": 4.5}
    records = run_all([table], setting, fake, lambda run: starts.get(run.arm, 5.0) - 0.5 * math.log2(run.multiple))
    lengths: dict[str, set[float]] = {}
    for record in records.values():
        lengths.setdefault(record.arm, set()).add(record.multiple)
    assert lengths["pre-ln/adam"] == {1.0}
    # 5.3 − ½·log₂ 1.5 = 5.01, − ½·log₂ 2 = 4.8, − ½·log₂ 3 = 4.51: the baseline at 2, its rival's 4.5 never
    assert lengths["e-spa/muon"] == {1.0, 1.5, 2.0, 3.0}
    assert lengths["e-spa-skip/muon"] == {1.0, 1.5, 2.0, 0.75}  # 5.0 as the baseline, 4.5 at 2
    assert lengths["e-spa/adam"] == {1.0, 1.5, 2.0, 3.0}  # never
    assert lengths["pre-ln/muon"] == {1.0, 0.75, 0.5}
    assert sum(record.measure == "pace" for record in records.values()) == 6


def test_arms_named_alone_climb_to_baselines_that_were_run_before(setting: Setting, fake) -> None:
    table = TABLES["optimisers"]
    before = run_all([table], setting, fake, lambda _: 5.0, ("pre-ln/adam",))
    records = run_all([table], setting, fake, lambda run: 5.2 - math.log2(run.multiple), ("e-spa/adam",), before)
    assert {r.multiple for r in records.values() if r.arm == "e-spa/adam"} == {1.0, 1.5}


def test_ratio_of_steps() -> None:
    assert steps_ratio(5.0, {1.0: 6.0, 2.0: 5.0}) == Ratio(2.0)
    assert steps_ratio(5.0, {1.0: 6.0, 2.0: 5.5}) == Ratio(2.0, ">")
    assert steps_ratio(5.0, {1.0: 4.0, 0.5: 4.5}) == Ratio(0.5, "<")
    assert steps_ratio(5.0, {1.0: 5.0}) == Ratio(1.0)
    assert steps_ratio(5.0, {}) is None
    assert steps_ratio(5.0, {1.0: INF}) is None
    assert steps_ratio(INF, {1.0: 5.0}) is None
    middle = steps_ratio(math.sqrt(6.0 * 4.0), {1.0: 6.0, 4.0: 4.0})
    assert middle is not None
    assert middle.value == pytest.approx(2.0)  # half way in logarithms of both
    assert [Ratio(2.0, ">").text(), Ratio(0.873).text()] == ["> 2", "0.87"]


@given(st.floats(0.5, 3.0), st.floats(0.05, 1.0))
def test_ratio_finds_a_power_law_again(needed: float, power: float) -> None:
    """Where the loss is a power of the length, interpolation is exact."""
    losses = {multiple: 5.0 * (needed / multiple) ** power for multiple in (0.5, 1.0, 1.5, 2.0, 3.0)}
    ratio = steps_ratio(5.0, losses)
    assert ratio is not None
    assert ratio.value == pytest.approx(needed, rel=1e-6)


def test_next_multiple() -> None:
    step_ladder = (0.5, 1.0, 2.0, 4.0)
    assert next_multiple(step_ladder, 5.0, {}) == 1.0
    assert next_multiple(step_ladder, 5.0, {1.0: 6.0}) == 2.0
    assert next_multiple(step_ladder, 5.0, {1.0: 6.0, 2.0: 5.5}) == 4.0
    assert next_multiple(step_ladder, 5.0, {1.0: 6.0, 2.0: 4.9}) is None
    assert next_multiple(step_ladder, 5.0, {1.0: 6.0, 2.0: 5.5, 4.0: 5.2}) is None
    assert next_multiple(step_ladder, 5.0, {1.0: 4.0}) == 0.5
    assert next_multiple(step_ladder, 5.0, {1.0: 4.0, 0.5: 4.5}) is None


def test_losses_from_the_moving_average() -> None:
    losses = [7.0, 6.0, 6.5, 5.0, 5.5, 5.25]
    average, lines = losses[0], []
    for step, loss in enumerate(losses, 1):
        average = 0.9 * average + 0.1 * loss if step > 1 else loss
        if step % 2 == 0:
            lines.append({"step": step, "ema": average})
    found = losses_of([*lines, {"step": 6, "valid_loss": 1.0}], 0.1)
    assert [step for step, _ in found] == [2, 4, 6]
    assert found[2][1] == pytest.approx((0.9 * 5.5 + 5.25) / 1.9)
    each = losses_of([{"step": n, "ema": e} for n, e in ((1, 7.0), (2, 6.9), (3, 6.86))], 0.1)
    assert [loss for _, loss in each] == pytest.approx([7.0, 6.0, 6.5])


def test_the_final_loss_is_of_the_last_steps() -> None:
    lines = [{"step": step, "ema": 8.0 if step <= 900 else 5.0} for step in range(10, 1001, 10)]
    assert final_loss(lines, 1.0, 1000) == 5.0  # a tenth of 1,000
    assert final_loss(lines, 1.0, 2000) == INF  # it did not get there
    assert final_loss([], 1.0, 10) == INF
    long = [{"step": step, "ema": float(step)} for step in range(100, 10_001, 100)]
    assert final_loss(long, 1.0, 10_000) == pytest.approx(9_950)  # two intervals are 200 steps


def test_curves_are_thinned_with_their_end() -> None:
    lines = [{"step": step, "ema": 1.0 / step} for step in range(1, 1001)]
    curve = thinned(lines)
    assert len(curve) == 100
    assert curve[-1] == [1000, 0.001]
    assert thinned(lines[:7]) == [[n, round(1.0 / n, 4)] for n in range(1, 8)]


def test_records_survive_json_and_the_log(tmp_path, setting: Setting, fake, text: Text) -> None:
    table = TABLES["baselines"]
    good, bad = missing([table], setting, {})[:2]
    records = [fake(good, 5.25, measures={"x": 1.5}), fake(bad, INF)]
    for record in records:
        assert Record.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record
    folder = ResultsFolder(tmp_path / "results", "small")
    for record in records:
        folder.add(record)
    log = tmp_path / "results" / "logs" / "baselines-small.jsonl"
    assert len(log.read_text().splitlines()) == 2
    with log.open("a") as file:
        file.write('{"key": "half of a li')  # a kill in the middle of a write
    again = ResultsFolder(tmp_path / "results", "small")
    assert again.records == {record.key: record for record in records}
    assert again.texts() == [text]
    assert ResultsFolder(tmp_path / "results", "tiny").records == {}
    assert records[0].value("valid_perplexity") == pytest.approx(math.exp(5.25))
    assert (records[0].value("x"), records[0].value("y"), records[1].value("train_loss")) == (1.5, None, INF)


def test_a_reader_leaves_the_log_to_who_holds_the_folder(tmp_path, setting: Setting, fake) -> None:
    first, second = (fake(run, 5.0) for run in missing([TABLES["baselines"]], setting, {})[:2])
    holder = ResultsFolder(tmp_path, "small")
    with holder.locked():
        holder.add(first)
        log = holder.log("baselines")
        log.write_bytes(log.read_bytes() + b'{"key": "half of a li')  # as it is being written
        before = log.read_bytes()
        reader = ResultsFolder(tmp_path, "small")
        assert (list(reader.records), log.read_bytes()) == ([first.key], before)
        holder.add(second)
    with reader.locked():
        assert list(reader.records) == [first.key, second.key]


@pytest.mark.parametrize("line", ['{"key": "a"}', "[]", "null", "{"])
def test_a_damaged_log_is_named(tmp_path, line: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "baselines-small.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"baselines-small\.jsonl is damaged or of another version"):
        ResultsFolder(tmp_path, "small")


def test_settings(text: Text) -> None:
    assert (Setting.of(SCALES["small"], text).rates, Setting.of(SCALES["small"], text).seeds) == (3, 2)
    with pytest.raises(ValueError, match="--seeds is 0; it must lie in 1 … 1000"):
        Setting.of(SCALES["small"], text, seeds=0)
