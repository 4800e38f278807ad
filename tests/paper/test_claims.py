"""Claims judged on made-up records: they pass, they fail, and they say when nothing was run."""

import pytest

from skipless.paper.claims import (
    Above,
    Learns,
    Lower,
    Match,
    Plateau,
    Reaches,
    Results,
    SmallerGap,
    Verdict,
)
from skipless.paper.experiments import SCALES, Setting
from skipless.paper.kernels import Check, kernel_checks, kernels_page
from skipless.paper.records import Text
from skipless.paper.runs import Outcome, Sweep, missing
from skipless.paper.tables import TABLES, as_json, gather, markdown

INF = float("inf")


@pytest.fixture
def results(text: Text, fake):
    """Results from {arm: {multiple: losses by seed}}."""
    table, setting = TABLES["longer"], Setting.of(SCALES["small"], text)
    run = missing([table], setting, {})[0]

    def make(losses: dict[str, dict[float, list[float]]], **values) -> Results:
        outcomes = {}
        for name, runs in losses.items():
            records = {m: {s: fake(run, loss, **values) for s, loss in enumerate(seeds)} for m, seeds in runs.items()}
            best = None if runs == {} else 3e-5
            outcomes[name] = Outcome(table.arm("e-spa"), Sweep(best=best), runs=records)
        return Results(outcomes, 7.5)

    return make


def mark(claim, results: Results) -> str:
    return claim.judge(results).mark


def test_lower(results) -> None:
    seen = results({"a": {1.0: [5.0, 5.1]}, "b": {1.0: [5.4, 5.6]}, "lost": {}})
    assert Lower("a", "b", 0.2).judge(seen) == Verdict("pass", "5.050 ± 0.050 against 5.500 ± 0.100")
    assert mark(Lower("a", "b", 0.31), seen) == "fail"  # 0.45 less what seeds differ by, 0.05 and 0.1
    assert mark(Lower("b", "a"), seen) == "fail"
    assert mark(Lower("a", "c"), seen) == "not run"
    assert mark(Lower("a", "lost"), seen) == "pass"
    assert Lower("lost", "a").judge(seen) == Verdict("fail", "lost diverged")
    assert mark(Lower("a@2", "a"), seen) == "not run"


def test_match(results) -> None:
    seen = results({"a": {1.0: [5.0]}, "b": {1.0: [5.05]}, "lost": {}})
    assert mark(Match("b", "a", 0.1), seen) == "pass"
    assert mark(Match("b", "a", 0.04), seen) == "fail"
    assert mark(Match("a", "b", 0.0), seen) == "pass"
    assert mark(Match("lost", "a", 0.1), seen) == "fail"
    assert mark(Match("c", "a", 0.1), seen) == "not run"


def test_learning_and_plateaus(results) -> None:
    seen = results({"learns": {1.0: [6.0, 6.2]}, "stuck": {1.0: [7.48]}, "lost": {}})
    assert mark(Learns("learns"), seen) == "pass"
    assert [mark(Learns(name), seen) for name in ("stuck", "lost", "none")] == ["fail", "fail", "not run"]
    assert [mark(Plateau(name), seen) for name in ("stuck", "lost", "learns", "none")] == [
        "pass",
        "pass",
        "fail",
        "not run",
    ]


def test_gaps_and_lengths(results) -> None:
    seen = results(
        {"a": {1.0: [5.0], 4.0: [4.5]}, "b": {1.0: [6.0], 2.0: [5.5], 4.0: [4.9]}, "lost": {}, "one": {1.0: [6.0]}}
    )
    assert mark(SmallerGap(("a@4", "b@4"), ("a", "b")), seen) == "pass"
    assert mark(SmallerGap(("a", "b"), ("a@4", "b@4")), seen) == "fail"
    assert mark(SmallerGap(("a", "c"), ("a", "b")), seen) == "not run"
    assert mark(Reaches("b", "a", 4.0), seen) == "pass"
    assert mark(Reaches("b", "a", 3.0), seen) == "fail"
    assert mark(Reaches("one", "a", 3.0), seen) == "not run"  # longer ones have yet to be run
    assert mark(Reaches("one", "a", 1.0), seen) == "fail"
    assert mark(Reaches("lost", "a", 3.0), seen) == "fail"
    assert mark(Reaches("c", "a", 3.0), seen) == "not run"


def test_measures(results) -> None:
    seen = results({"a": {1.0: [5.0]}}, measures={"recency_end": 0.2})
    assert mark(Above("a", "recency_end", 0.1), seen) == "pass"
    assert mark(Above("a", "recency_end", 0.3), seen) == "fail"
    assert mark(Above("a", "agreement_with_theory", 0.3), seen) == "not run"


def filled(name: str, setting: Setting, fake, losses: dict[str, float]) -> dict:
    table, records = TABLES[name], {}
    while runs := missing([table], setting, records):
        records |= {run.key: fake(run, losses.get(run.arm, 6.0) + 0.02 * run.seed) for run in runs}
    return records


def test_a_reproduction_that_agrees_and_one_that_does_not(text: Text, fake) -> None:
    table, setting = TABLES["baselines"], Setting.of(SCALES["small"], text)
    as_paper = {"pre-ln": 4.8, "e-spa": 5.7, "u-spa": 6.0, "v-skipinit": 6.0, "skipless-ln": 7.5}
    good = gather(table, setting, filled("baselines", setting, fake, as_paper))
    assert {verdict.mark for _, verdict in good.verdicts} == {"pass"}
    assert good.to_do == 0
    bad = gather(table, setting, filled("baselines", setting, fake, {**as_paper, "e-spa": 6.5, "skipless-ln": 6.0}))
    assert [verdict.mark for _, verdict in bad.verdicts] == ["fail", "pass", "pass", "pass", "fail", "fail", "pass"]
    page = markdown(bad, "baselines-small.png")
    assert "| e-spa ends below u-spa by more than 0.05 | **fail** | 6.510 ± 0.010 against 6.010 ± 0.010 |" in page
    assert "| E-SPA | 2.79 ± 0.02 | 6.510 ± 0.010 | 1500 | 20 s | 2 | 2e-05 | baselines-small" in page
    assert "![Training curves, and the rates tried](baselines-small.png)" in page
    assert "All runs of the usual arms are done. Only with `--arms all`, and not run: " in page
    assert "At a glance" not in page  # its arms have one name each


def test_arms_left_to_the_user_are_named(text: Text, fake) -> None:
    table, setting = TABLES["optimisers"], Setting.of(SCALES["small"], text)
    page = markdown(gather(table, setting, filled("optimisers", setting, fake, {})))
    assert "All runs of the usual arms are done. Only with `--arms all`, and not run: Pre-LN, SOAP; " in page
    assert "E-SPA, Muon, W_V and W_O at 0.3" in page.splitlines()[-1]
    begun = missing([table], setting, {}, ("pre-ln/soap",))[0]
    records = {**filled("optimisers", setting, fake, {}), begun.key: fake(begun, 5.0)}
    page = markdown(gather(table, setting, records))
    assert "Only with `--arms all`, and not complete: Pre-LN, SOAP (2 runs); not run: Pre-LN, Muon, W_V" in page
    swept = [run for run in missing([table], setting, records, ("pre-ln/soap",)) if run.stage == 0]
    records |= {run.key: fake(run, 5.0) for run in swept}
    page = markdown(gather(table, setting, records))  # a second seed, another length and a pace
    assert "Only with `--arms all`, and not complete: Pre-LN, SOAP (3 runs); not run: Pre-LN, Muon, W_V" in page


def test_nothing_run_is_said_so(text: Text) -> None:
    table, setting = TABLES["baselines"], Setting.of(SCALES["small"], text)
    summary = gather(table, setting, {})
    assert {verdict.mark for _, verdict in summary.verdicts} == {"not run"}
    page = markdown(summary)
    assert "| E-SPA | 2.79 ± 0.02 | – | – | – | – | – | – |" in page
    assert "At least 15 runs are still missing" in page
    assert as_json(summary)["missing"] == 15


def test_an_unfinished_sweep_shows_its_best_so_far(text: Text, fake) -> None:
    table, setting = TABLES["baselines"], Setting.of(SCALES["small"], text)
    runs = missing([table], setting, {})
    summary = gather(table, setting, {runs[0].key: fake(runs[0], 6.1), runs[1].key: fake(runs[1], INF)})
    page = markdown(summary)
    assert "| E-SPA | 2.79 ± 0.02 | 6.100 (sweep: 2 of 3) | 1500 |" in page
    assert "2e-05: 6.100; 3e-05: diverged at step 7" in page
    assert summary.verdicts[1][1].mark == "not run"


def test_claims_are_not_judged_at_the_smallest_size(text: Text) -> None:
    page = markdown(gather(TABLES["baselines"], Setting.of(SCALES["tiny"], text), {}))
    assert "Not judged at this scale" in page


def test_ratios_to_the_baseline(text: Text, fake) -> None:
    table, setting, records = TABLES["optimisers"], Setting.of(SCALES["small"], text, seeds=1), {}
    starts = {"pre-ln/adam": 5.0, "pre-ln/muon": 4.5, "e-spa/muon": 5.0 * 2**0.1}
    while runs := missing([table], setting, records):
        for run in runs:
            pace = 0.02 if run.arm.endswith("muon") else 0.01
            loss = starts.get(run.arm, 6.9) / run.multiple**0.1
            records[run.key] = fake(run, loss, step_seconds=pace)
    page = markdown(gather(table, setting, records))
    assert "| E-SPA, Muon |  | 2 | 4 | > 3 |" in page  # twice the steps, each of twice the time
    assert "| E-SPA, Adam |  | > 3 | > 3 | > 3 |" in page
    assert (
        "|  | adam | muon | soap | muon-vo | muon-gain |\n|---|---|---|---|---|---|\n"
        "| pre-ln | 5.000 | 4.500 (< 0.5×) | – | – | – |" in page
    )
    assert "\n| e-spa | 6.900 (> 3×) | 5.359 (2×) | – | – | – |" in page
    data = as_json(gather(table, setting, records))
    assert data["ratios"][2]["steps to the baseline"] == "2"
    assert data["glance"][:2] == [
        ["", "adam", "muon", "soap", "muon-vo", "muon-gain"],
        ["pre-ln", "5.000", "4.500 (< 0.5×)", "–", "–", "–"],
    ]
    assert data["bands"][4] == {
        "claim": "e-spa/muon reaches the loss of pre-ln/adam in at most 2 times its steps",
        "mark": "pass",
        "detail": "2 times",
    }


def test_kernels_of_the_figures() -> None:
    """Fig. 1, 5, 6 and 7 agree with what the paper says of them."""
    checks = kernel_checks()
    assert len(checks) == 16
    assert all(check.holds for check in checks), [check for check in checks if not check.holds]
    page = kernels_page(TABLES["kernels"], [*checks, Check("Fig. 0", "the earth is flat", "no", False)])
    assert page.count("| pass |") == 16
    assert "| Fig. 0 | the earth is flat | no | **fail** |" in page
