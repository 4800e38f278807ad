"""Figures of training: of a table, whose curves and rates are all there, and of the demo."""

import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from skipless.figures.kernels import Heading
from skipless.figures.style import render
from skipless.figures.training import (
    ArmCurve,
    ArmPicture,
    demo_picture,
    kernels_by_stage,
    looks,
    reproduction,
    smoothed,
)
from skipless.theory.certificate import Verdict

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


def test_crosses_and_thin_lines_are_explained_where_they_are():
    def notes(*arms):
        return [text.get_text() for axes in reproduction(arms, 7.5, HEADING).axes[:2] for text in axes.texts]

    unigram = "unigram entropy, 7.50, lies above"
    assert notes(arm("a")) == [unigram]
    both = notes(arm("a", others=1), arm("b", diverged=(1e-3,)))
    assert set(both) == {unigram, "thin: further seeds", "× diverged, or ended higher"}


def test_curves_fill_their_axes_where_arms_differ():
    steps = [0, 100, 200, 1000]
    drawn = [ArmCurve(f"{end}", steps, [9.0, 7.0, 5.0, end], "", {1e-4: end, 1e-3: 7.4}) for end in (4.0, 4.4)]
    curves, sweep = reproduction(drawn, 7.5, HEADING).axes[:2]
    low, high = curves.get_ylim()
    assert (3.8 < low < 4.0, 4.4 < high < 5.0) == (True, True)
    assert curves.get_xlim()[0] == pytest.approx(0.9 * 1000)  # the first step that all of this shows
    assert sweep.get_ylim()[1] > 7.5 > high  # rates that ended near the unigram entropy are shown beside it
    assert [line.get_marker() for line in sweep.lines].count("x") == 2
    assert not any(len(line.get_xdata()) for line in sweep.lines if line.get_marker() == "x")


def test_networks_near_the_frequencies_do_not_run_through_their_name():
    near = [ArmCurve(f"{end}", [1, 500, 1500], [8.0, 7.6, end], "", {1e-4: end}) for end in (7.51, 7.48, 7.4, 7.3)]
    figure = reproduction(near, 7.5, HEADING)
    curves, renderer = figure.axes[0], FigureCanvasAgg(figure).get_renderer()
    name = next(text for text in curves.texts if "unigram" in text.get_text())
    assert name.get_text() == "unigram entropy, 7.50, dotted"
    assert name.get_window_extent(renderer).y0 >= curves.bbox.y1  # above the axes


def test_measures_by_block_have_a_panel_each_with_the_looks_of_their_arms():
    rises, errors = ([1, 2, 3], [2.0, 0.1, -1e-4]), ([0, 1, 2, 3], [1.0, 1e-2, 1e-4, 1e-7])
    both = ArmCurve(
        "both", [1, 2], [7.0, 5.0], "5.00", {1e-4: 5.0}, name="a/x", by_block={"rise": rises, "error": errors}
    )
    one = ArmCurve("one", [1, 2], [7.0, 5.0], "5.00", {1e-4: 5.0}, name="b/x", by_block={"rise": rises})
    without = arm("none")
    plain, figure = reproduction([without], 7.5, HEADING), reproduction([both, one, without], 7.5, HEADING)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}
    assert not [axes for axes in plain.axes if axes.get_title(loc="left")]
    assert list(panels) == ["rise", "error"]
    assert [len(panels[name].lines) for name in panels] == [2, 1]
    assert [axes.get_yscale() for axes in panels.values()] == ["symlog", "log"]
    assert list(panels["error"].lines[0].get_xdata()) == [0, 1, 2, 3]
    curve = next(line for line in figure.axes[0].lines if list(line.get_ydata()) == [7.0, 5.0])
    assert panels["rise"].lines[0].get_color() == panels["error"].lines[0].get_color() == curve.get_color()


def test_a_rate_that_ended_above_the_axes_is_not_lost():
    high = ArmCurve("high", [1, 2], [7.0, 5.0], "5.00", {1e-4: 5.0, 1e-3: 11.0})
    sweep = reproduction([high], 7.5, HEADING).axes[1]
    crosses = [line for line in sweep.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[1e-3]]
    assert all(line.get_ydata()[0] < sweep.get_ylim()[1] for line in crosses)


def test_kernels_during_training_have_a_scale():
    stages = {f"step {step}": {block: np.eye(4) for block in (0, 1, 36)} for step in (0, 100)}
    figure = kernels_by_stage(stages, HEADING)
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["0", "", "0.5", "", "1"]
    assert any(text.get_text() == "cosine between two locations" for text in figure.texts)
    renderer = FigureCanvasAgg(figure).get_renderer()
    assert all(figure.bbox.y0 <= axes.get_tightbbox(renderer).y0 for axes in figure.axes)


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


COUNTING = 3.25
BLOCKS = (0, 1, 36)


def network(label: str, end: float, verdict: Verdict, kernel: np.ndarray) -> ArmPicture:
    losses = end + np.exp(-np.arange(60) / 5)
    return ArmPicture(label, "skips: none", losses, end, dict.fromkeys(BLOCKS, kernel), kernel, verdict)


@pytest.fixture(scope="module")
def arms() -> list[ArmPicture]:
    kept, lost = Verdict("preserved", None, ""), Verdict("collapse", 11, "")
    return [
        network("Pre-LN", 2.5, kept, np.eye(8)),
        network("standard", 3.25, lost, np.ones((8, 8))),
        network("E-SPA", 2.52, kept, np.full((8, 8), np.nan)),
    ]


@pytest.fixture(scope="module")
def figure(arms):
    return demo_picture(arms, COUNTING, Heading("Title", "Subtitle"))


def curves(figure):
    return next(axes for axes in figure.axes if len(axes.lines) > 1)


def test_a_curve_raw_and_smoothed_per_network_and_the_reference(figure, arms) -> None:
    reference, *lines = curves(figure).lines
    assert list(reference.get_ydata()) == [COUNTING, COUNTING]
    for each, raw, smooth in zip(arms, lines[::2], lines[1::2], strict=True):
        np.testing.assert_array_equal(raw.get_ydata(), each.losses)
        np.testing.assert_array_equal(smooth.get_ydata(), smoothed(each.losses))
        assert raw.get_alpha() < 0.5
        assert raw.get_xdata()[0] == 1
        assert raw.get_xdata()[-1] == len(each.losses)


def test_labels_name_the_curves_and_do_not_touch(figure, arms) -> None:
    axes = curves(figure)
    labels = {text.get_text().partition("\n")[0]: text for text in axes.texts}
    assert set(labels) == {"Pre-LN", "standard", "E-SPA", "counting symbols, 3.25"}
    heights = sorted(labels[each.label].xy[1] for each in arms)
    low, high = axes.get_ylim()
    assert min(np.diff(heights)) >= 0.14 * (high - low)
    assert all(low <= height <= high for height in heights)


def test_panels(figure, arms) -> None:
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == len(arms) * (len(BLOCKS) + 1)
    assert {panel.images[0].get_clim() for panel in panels} == {(0.0, 1.0)}
    words = [text.get_text() for text in figure.texts]
    assert [words.count(mean) for mean in ("0.00", "1.00", "nan")] == [4, 4, 4]
    assert {"input", "block 1", "block 36", "block 36, trained", "✖ collapse\nat block 11", "✔ preserved"} <= set(words)


def test_smoothing_keeps_constants_and_starts_at_the_first_loss() -> None:
    np.testing.assert_allclose(smoothed(np.full(90, 2.0)), 2.0, rtol=1e-15)
    assert smoothed(np.array([3.0, 1.0] * 60))[0] == 3.0
    np.testing.assert_array_equal(smoothed(np.array([3.0, 1.0])), [3.0, 1.0])


def test_it_renders_without_a_warning(figure) -> None:
    assert render(figure, ".png", dpi=40).startswith(b"\x89PNG")


def test_a_long_title_stays_on_the_page():
    for words in ("A title", "A title that goes on " * 8):
        figure = reproduction([arm("a")], 7.5, Heading(words, "a subtitle"))
        renderer = FigureCanvasAgg(figure).get_renderer()
        title = next(text for text in figure.texts if text.get_text() == words)
        assert title.get_window_extent(renderer).x1 <= figure.bbox.x1
        assert (title.get_fontsize() == 15) == (words == "A title")
