"""The paper's numbers as data: complete, under names that exist, and as it prints them."""

import math

import pytest

from skipless.model.presets import PRESETS
from skipless.paper import numbers
from skipless.paper.numbers import Printed
from skipless.training.tasks import TASKS

TABLES = {"wikitext103": (numbers.TABLE_1, numbers.TABLE_4, numbers.TABLE_5), "c4": (numbers.TABLE_2,)}


@pytest.mark.parametrize("corpus", TABLES)
def test_every_row_names_a_preset(corpus: str) -> None:
    for table in TABLES[corpus]:
        assert {f"{corpus}/{name}" for name in table} <= set(PRESETS)
    assert {f"depth/e-spa-{depth}" for depth in numbers.TABLE_3} <= set(PRESETS)
    assert {f"c4/{name}" for name, _ in numbers.TABLE_6} <= set(PRESETS)


def test_tables_are_whole() -> None:
    assert [len(t) for t in (numbers.TABLE_1, numbers.TABLE_4, numbers.TABLE_5, numbers.TABLE_2)] == [20, 18, 6, 11]
    assert set(numbers.TABLE_1) - set(numbers.TABLE_4) == {"e-spa-sigmoid", "e-spa-sigmoid-ln"}
    assert set(numbers.TABLE_5) <= set(numbers.TABLE_4)
    assert all(list(losses) == [1.0, 4.0, 10.0] for losses in numbers.TABLE_3.values())
    assert tuple(TASKS) == numbers.TASKS
    assert all(len(accuracies) == len(numbers.TASKS) for accuracies in numbers.TABLE_6.values())


def test_what_the_text_says_of_the_tables_holds() -> None:
    """Sec. 4: E-SPA is best, DKS without LN the best of it; sigmoid does not train; deeper ones catch up."""
    losses = {name: value for name, (value, _) in numbers.TABLE_1.items()}
    assert min(losses, key=lambda name: losses[name]) == "e-spa"
    for scheme in ("u-spa", "v-skipinit"):
        assert all(losses[name.replace(scheme, "e-spa")] < losses[name] for name in losses if name.startswith(scheme))
    assert all(losses[name] > 7.4 for name in losses if "sigmoid" in name)
    assert min(numbers.TABLE_2, key=lambda name: numbers.TABLE_2[name]) == "e-spa-skip-ln"
    assert numbers.TABLE_2["e-spa-skip"] == numbers.TABLE_2["pre-ln"]
    gaps = [numbers.TABLE_3[108][steps] - numbers.TABLE_3[36][steps] for steps in (1.0, 4.0, 10.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == pytest.approx(0.01)
    assert numbers.TABLE_3[72][10.0] == min(numbers.TABLE_3[depth][10.0] for depth in numbers.TABLE_3)


def test_validation_is_worse_than_training_on_wikitext() -> None:
    """Sec. 4: "on which we observed overfitting"; the logarithm of a perplexity is a loss."""
    for name, (perplexity, _) in numbers.TABLE_4.items():
        assert math.log(perplexity) > numbers.TABLE_1[name][0] - 0.2


def test_lookups() -> None:
    assert numbers.train_loss("e-spa") == (Printed("Table 1", "train_loss", 2.79, 0.02),)
    assert numbers.train_loss("pre-ln")[0].value == 1.76
    assert numbers.train_loss("skip") == ()
    assert numbers.valid_perplexity("u-spa", "none") == (Printed("Table 5", "valid_perplexity", 28.1, 0.4),)
    assert numbers.valid_perplexity("e-spa-sigmoid") == ()


def test_cells() -> None:
    assert Printed("", "train_loss", 2.8, 0.02).text() == "2.80 ± 0.02"
    assert Printed("", "valid_perplexity", 24.0).text() == "24.0"
    assert Printed("", "boolq", 60.9).text() == "60.9"
