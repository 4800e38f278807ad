"""What a reproduction's picture draws of an arm: every length the item is about, not those of a ladder."""

from skipless.cli.reproduce import _curves
from skipless.paper.catalogue import ITEMS
from skipless.paper.experiments import SCALES, Setting, Text
from skipless.paper.runs import missing, outcomes


def drawn(name: str, text: Text, fake) -> list[dict]:
    item, setting, records = ITEMS[name], Setting.of(SCALES["small"], text), {}
    while jobs := missing([item], setting, records):
        records |= {job.key: fake(job, 6.0 - 0.1 * job.multiple + 0.02 * job.seed) for job in jobs}
    known = outcomes(item, setting, records)
    return [curve for outcome in known.values() for curve in _curves(outcome, setting.scale)]


def test_the_longest_length_is_drawn_beside_the_usual_one(text: Text, fake) -> None:
    curves = {curve["label"]: curve for curve in drawn("longer", text, fake)}
    assert list(curves) == ["Pre-LN", "E-SPA", "E-SPA, 5× the steps"]
    usual, longest = curves["E-SPA"], curves["E-SPA, 5× the steps"]
    assert (usual["name"], longest["name"]) == ("e-spa", "e-spa/×5")
    assert (usual["final"], longest["final"]) == ("5.91 ± 0.01", "5.50")
    assert len(usual["sweep"]) >= 3
    assert longest["sweep"] == {}
    assert len(usual["others"]) == 1


def test_a_ladder_s_lengths_are_not_drawn(text: Text, fake) -> None:
    labels = [curve["label"] for curve in drawn("optimisers", text, fake)]
    assert len(labels) == len(set(labels)) == 6
    assert not any("the steps" in label for label in labels)
