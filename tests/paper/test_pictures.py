"""What a reproduction's picture draws of an arm: every step multiple the table is about, not those of a ladder."""

from skipless.cli.reproduce import curves
from skipless.paper.experiments import SCALES, Setting
from skipless.paper.records import Text
from skipless.paper.runs import missing, outcomes
from skipless.paper.tables import TABLES


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
