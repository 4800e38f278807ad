"""Pictures of a reproduction: every seed and every rate is there, and no line of the key runs into another."""

import math

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from skipless.analysis.figures import Heading
from skipless.analysis.reproduce_figure import ArmCurve, looks, reproduction

HEADING = Heading("A title", "a subtitle")


def arm(label, others=0, diverged=()):
    steps = [100, 200, 300]
    sweep = {1e-4: 5.2, 2e-4: 5.1} | dict.fromkeys(diverged, math.inf)
    return ArmCurve(label, steps, [7.0, 6.0, 5.1], "5.10", sweep, [(steps, [7.1, 6.1, 5.3])] * others)


def test_further_seeds_are_drawn_thinner_and_inside_the_axes():
    far = ArmCurve("far", [1, 2], [7.0, 5.0], "8.00", {1e-4: 5.0}, [([1, 2], [9.0, 11.0])])
    curves = reproduction([arm("two seeds", others=1), far], 7.5, HEADING).axes[0]
    lines = [line for line in curves.lines if len(line.get_xdata()) > 1 and line.get_xdata()[0] != 0]
    assert [line.get_linewidth() < 1.0 for line in lines] == [False, True, False, True]
    assert curves.get_ylim()[1] > 11.0


def test_marks_of_rates_at_which_several_arms_diverged_do_not_cover_each_other():
    sweep = reproduction([arm("a", diverged=(1e-3,)), arm("b", diverged=(1e-3,))], 7.5, HEADING).axes[1]
    heights = [line.get_ydata()[0] for line in sweep.lines if line.get_marker() == "x"]
    assert len(set(heights)) == 2


@pytest.mark.parametrize("length", [10, 55, 90])
def test_lines_of_the_key_do_not_run_into_each_other(length):
    labels = [f"{number} {'n' * length}" for number in range(5)]
    figure = reproduction([arm(label) for label in labels], 7.5, HEADING)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.texts if text.get_text()[:1].isdigit()]
    assert len(boxes) == 5
    width = figure.bbox.width
    for index, box in enumerate(boxes):
        assert box.x1 < width
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_a_kind_has_a_colour_and_a_way_a_line_style():
    names = [f"{kind}/{way}" for kind in "abcde" for way in ("adam", "muon", "soap", "slow")]
    found = {name: (str(look["color"]), look["linestyle"]) for name, look in zip(names, looks(names), strict=True)}
    assert len(set(found.values())) == 20
    assert len({found[f"a/{way}"][0] for way in ("adam", "muon", "soap", "slow")}) == 1
    assert len({found[f"{kind}/soap"][1] for kind in "abcde"}) == 1


@pytest.mark.parametrize("names", [[f"arm {n}" for n in range(11)], ["a", *(f"a/{n}" for n in range(6))]])
def test_with_more_kinds_or_ways_than_looks_no_two_arms_look_alike(names):
    assert len({(str(look["color"]), look["linestyle"]) for look in looks(names)}) == len(names)
