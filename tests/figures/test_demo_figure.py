"""The demonstration's picture by its structure and data, not by its pixels."""

import numpy as np
import pytest

from skipless.figures.kernels import Heading
from skipless.figures.style import render
from skipless.figures.training import ArmPicture, demo_picture, smoothed
from skipless.theory.certificate import Verdict

COUNTING = 3.25
BLOCKS = (0, 1, 36)


def arm(label: str, end: float, verdict: Verdict, kernel: np.ndarray) -> ArmPicture:
    losses = end + np.exp(-np.arange(60) / 5)
    return ArmPicture(label, "skips: none", losses, end, dict.fromkeys(BLOCKS, kernel), kernel, verdict)


@pytest.fixture(scope="module")
def arms() -> list[ArmPicture]:
    kept, lost = Verdict("preserved", None, ""), Verdict("collapse", 11, "")
    return [
        arm("Pre-LN", 2.5, kept, np.eye(8)),
        arm("standard", 3.25, lost, np.ones((8, 8))),
        arm("E-SPA", 2.52, kept, np.full((8, 8), np.nan)),
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
