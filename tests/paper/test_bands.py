"""Bands judged on made-up records: they pass, they fail, and they say when nothing was run."""

import pytest

from skipless.paper.catalogue import ITEMS
from skipless.paper.claims import (
    Above,
    Check,
    Learns,
    Lower,
    Match,
    Plateau,
    Reaches,
    Results,
    SmallerGap,
    Verdict,
    kernel_checks,
)
from skipless.paper.experiments import SCALES, Setting, Text
from skipless.paper.runs import Outcome, missing
from skipless.paper.tables import as_json, gather, kernels_markdown, markdown

INF = float("inf")


@pytest.fixture
def findings(text: Text, fake):
    """Results from {arm: {multiple: losses by seed}}."""
    item, setting = ITEMS["longer"], Setting.of(SCALES["small"], text)
    job = missing([item], setting, {})[0]

    def make(losses: dict[str, dict[float, list[float]]], **values) -> Results:
        outcomes = {}
        for name, runs in losses.items():
            records = {m: {s: fake(job, loss, **values) for s, loss in enumerate(seeds)} for m, seeds in runs.items()}
            best = None if runs == {} else 3e-5
            outcomes[name] = Outcome(item.arm("e-spa"), {}, (), best, False, records)
        return Results(outcomes, 7.5)

    return make


def mark(band, findings: Results) -> str:
    return band.judge(findings).mark


def test_lower(findings) -> None:
    seen = findings({"a": {1.0: [5.0, 5.1]}, "b": {1.0: [5.4, 5.6]}, "lost": {}})
    assert Lower("a", "b", 0.2).judge(seen) == Verdict("pass", "5.050 ± 0.050 against 5.500 ± 0.100")
    assert mark(Lower("a", "b", 0.31), seen) == "fail"  # 0.45 less what seeds differ by, 0.05 and 0.1
    assert mark(Lower("b", "a"), seen) == "fail"
    assert mark(Lower("a", "c"), seen) == "not run"
    assert mark(Lower("a", "lost"), seen) == "pass"
    assert Lower("lost", "a").judge(seen) == Verdict("fail", "lost diverged")
    assert mark(Lower("a@2", "a"), seen) == "not run"


def test_match(findings) -> None:
    seen = findings({"a": {1.0: [5.0]}, "b": {1.0: [5.05]}, "lost": {}})
    assert mark(Match("b", "a", 0.1), seen) == "pass"
    assert mark(Match("b", "a", 0.04), seen) == "fail"
    assert mark(Match("a", "b", 0.0), seen) == "pass"
    assert mark(Match("lost", "a", 0.1), seen) == "fail"
    assert mark(Match("c", "a", 0.1), seen) == "not run"


def test_learning_and_plateaus(findings) -> None:
    seen = findings({"learns": {1.0: [6.0, 6.2]}, "stuck": {1.0: [7.48]}, "lost": {}})
    assert mark(Learns("learns"), seen) == "pass"
    assert [mark(Learns(name), seen) for name in ("stuck", "lost", "none")] == ["fail", "fail", "not run"]
    assert [mark(Plateau(name), seen) for name in ("stuck", "lost", "learns", "none")] == [
        "pass",
        "pass",
        "fail",
        "not run",
    ]


def test_gaps_and_lengths(findings) -> None:
    seen = findings(
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


def test_measures(findings) -> None:
    seen = findings({"a": {1.0: [5.0]}}, measures={"recency_end": 0.2})
    assert mark(Above("a", "recency_end", 0.1), seen) == "pass"
    assert mark(Above("a", "recency_end", 0.3), seen) == "fail"
    assert mark(Above("a", "agreement_with_theory", 0.3), seen) == "not run"


def filled(name: str, setting: Setting, fake, losses: dict[str, float]) -> dict:
    item, records = ITEMS[name], {}
    while jobs := missing([item], setting, records):
        records |= {job.key: fake(job, losses.get(job.arm, 6.0) + 0.02 * job.seed) for job in jobs}
    return records


def test_a_reproduction_that_agrees_and_one_that_does_not(text: Text, fake) -> None:
    item, setting = ITEMS["baselines"], Setting.of(SCALES["small"], text)
    as_paper = {"pre-ln": 4.8, "e-spa": 5.7, "u-spa": 6.0, "v-skipinit": 6.0, "skipless-ln": 7.5}
    good = gather(item, setting, filled("baselines", setting, fake, as_paper))
    assert {verdict.mark for _, verdict in good.verdicts} == {"pass"}
    assert good.to_do == 0
    bad = gather(item, setting, filled("baselines", setting, fake, {**as_paper, "e-spa": 6.5, "skipless-ln": 6.0}))
    assert [verdict.mark for _, verdict in bad.verdicts] == ["fail", "pass", "pass", "pass", "fail", "fail", "pass"]
    page = markdown(bad, "baselines-small.png")
    assert "| e-spa ends below u-spa by more than 0.05 | **fail** | 6.510 ± 0.010 against 6.010 ± 0.010 |" in page
    assert "| E-SPA | 2.79 ± 0.02 | 6.510 ± 0.010 | 1500 | 20 s | 2 | 2e-05 | baselines-small" in page
    assert "![Training curves, and the rates tried](baselines-small.png)" in page
    assert "All runs of the usual arms are done. Only with `--arms all`, and not run: " in page
    assert "At a glance" not in page  # its arms have one name each


def test_arms_left_to_the_user_are_named(text: Text, fake) -> None:
    item, setting = ITEMS["optimisers"], Setting.of(SCALES["small"], text)
    page = markdown(gather(item, setting, filled("optimisers", setting, fake, {})))
    assert "All runs of the usual arms are done. Only with `--arms all`, and not run: Pre-LN, SOAP; " in page
    assert "E-SPA, Muon, W_V and W_O at 0.3" in page.splitlines()[-1]
    begun = missing([item], setting, {}, ("pre-ln/soap",))[0]
    records = {**filled("optimisers", setting, fake, {}), begun.key: fake(begun, 5.0)}
    page = markdown(gather(item, setting, records))
    assert "Only with `--arms all`, and not complete: Pre-LN, SOAP (2 runs); not run: Pre-LN, Muon, W_V" in page
    swept = [job for job in missing([item], setting, records, ("pre-ln/soap",)) if job.stage == 0]
    records |= {job.key: fake(job, 5.0) for job in swept}
    page = markdown(gather(item, setting, records))  # a second seed, another length and a pace
    assert "Only with `--arms all`, and not complete: Pre-LN, SOAP (3 runs); not run: Pre-LN, Muon, W_V" in page


def test_nothing_run_is_said_so(text: Text) -> None:
    item, setting = ITEMS["baselines"], Setting.of(SCALES["small"], text)
    summary = gather(item, setting, {})
    assert {verdict.mark for _, verdict in summary.verdicts} == {"not run"}
    page = markdown(summary)
    assert "| E-SPA | 2.79 ± 0.02 | – | – | – | – | – | – |" in page
    assert "At least 15 runs are still missing" in page
    assert as_json(summary)["missing"] == 15


def test_an_unfinished_sweep_shows_its_best_so_far(text: Text, fake) -> None:
    item, setting = ITEMS["baselines"], Setting.of(SCALES["small"], text)
    jobs = missing([item], setting, {})
    summary = gather(item, setting, {jobs[0].key: fake(jobs[0], 6.1), jobs[1].key: fake(jobs[1], INF)})
    page = markdown(summary)
    assert "| E-SPA | 2.79 ± 0.02 | 6.100 (sweep: 2 of 3) | 1500 |" in page
    assert "2e-05: 6.100; 3e-05: diverged at step 7" in page
    assert summary.verdicts[1][1].mark == "not run"


def test_bands_are_not_judged_at_the_smallest_size(text: Text) -> None:
    page = markdown(gather(ITEMS["baselines"], Setting.of(SCALES["tiny"], text), {}))
    assert "Not judged at this scale" in page


def test_ratios_to_the_baseline(text: Text, fake) -> None:
    item, setting, records = ITEMS["optimisers"], Setting.of(SCALES["small"], text, seeds=1), {}
    starts = {"pre-ln/adam": 5.0, "pre-ln/muon": 4.5, "e-spa/muon": 5.0 * 2**0.1}
    while jobs := missing([item], setting, records):
        for job in jobs:
            pace = 0.02 if job.arm.endswith("muon") else 0.01
            loss = starts.get(job.arm, 6.9) / job.multiple**0.1
            records[job.key] = fake(job, loss, step_seconds=pace)
    page = markdown(gather(item, setting, records))
    assert "| E-SPA, Muon |  | 2 | 4 | > 3 |" in page  # twice the steps, each of twice the time
    assert "| E-SPA, Adam |  | > 3 | > 3 | > 3 |" in page
    assert (
        "|  | adam | muon | soap | muon-vo |\n|---|---|---|---|---|\n| pre-ln | 5.000 | 4.500 (< 0.5×) | – | – |"
        in page
    )
    assert "\n| e-spa | 6.900 (> 3×) | 5.359 (2×) | – | – |" in page
    data = as_json(gather(item, setting, records))
    assert data["ratios"][2]["steps to the baseline"] == "2"
    assert data["glance"][:2] == [
        ["", "adam", "muon", "soap", "muon-vo"],
        ["pre-ln", "5.000", "4.500 (< 0.5×)", "–", "–"],
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
    page = kernels_markdown(ITEMS["kernels"], [*checks, Check("Fig. 0", "the earth is flat", "no", False)])
    assert page.count("| pass |") == 16
    assert "| Fig. 0 | the earth is flat | no | **fail** |" in page
