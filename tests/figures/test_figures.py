"""Figures by their structure and data, not by their pixels."""

import matplotlib
import numpy as np
import pytest

from skipless.figures import kernels
from skipless.figures.kernels import GridRow, Heading
from skipless.figures.style import STYLE, render, verdict_mark
from skipless.inspection import studies
from skipless.inspection.studies import InputSignal, study
from skipless.theory.certificate import Verdict

HEADING = Heading("Title", "γ_L in a subtitle")
BLOCKS = (0, 1, 6)


@pytest.fixture(scope="module")
def studied():
    signal = InputSignal(0.02, 20)
    return [study(network, signal) for network in studies.networks(6, signal)]


@pytest.fixture(scope="module")
def rows(studied):
    return [
        GridRow(s.network.label, s.network.details(), {b: s.normalised(b) for b in BLOCKS}, s.certificate.verdict)
        for s in studied
    ]


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_grid_has_a_panel_per_network_and_block_and_one_scale(rows, studied) -> None:
    figure = kernels.kernel_grid(rows, HEADING)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == len(figure.axes) - 1 == 7 * 3
    assert {panel.images[0].get_clim() for panel in panels} == {(0.0, 1.0)}
    for number, panel in enumerate(panels):
        expected = studied[number // 3].normalised(BLOCKS[number % 3])
        np.testing.assert_array_equal(panel.images[0].get_array(), expected)


def test_grid_says_what_it_shows(rows) -> None:
    said = words(kernels.kernel_grid(rows, HEADING))
    assert {"Title", "input", "block 1", "block 6", *(row.label for row in rows)} <= set(said)
    for row in rows:
        assert verdict_mark(row.verdict)[0] in said
    assert f"{rows[0].cosines[6][~np.eye(20, dtype=bool)].mean():.3f}" in said


def test_verdicts_differ_by_shape_as_well_as_colour() -> None:
    kinds = ("preserved", "drift", "collapse", "explosion", "vanishing")
    marks = [verdict_mark(Verdict(kind, 1, "")) for kind in kinds]
    assert len({glyph for glyph, _ in marks}) == len(kinds)


def test_portrait_holds_kernels_and_the_certificates_curves(rows, studied) -> None:
    certificate = studied[2].certificate
    figure = kernels.network_portrait(rows[2], certificate, HEADING)
    curves = [axes for axes in figure.axes if axes.get_xlabel() == "block"]
    assert len([axes for axes in figure.axes if axes.images]) == 3
    assert len(curves) == 4
    cosines = [line.get_ydata() for line in curves[1].lines if len(line.get_ydata()) == 7]
    np.testing.assert_array_equal(cosines[0], [report.mean_cosine for report in certificate.reports])


def test_kernels_without_cosines_are_drawn_hatched(rows) -> None:
    broken = GridRow("broken", [], {0: np.full((4, 4), np.nan)}, rows[0].verdict)
    figure = kernels.kernel_grid([broken], HEADING)
    assert figure.axes[0].patch.get_hatch()
    assert render(figure, ".png")


def test_input_kernels() -> None:
    signals = studies.token_signals(length=15)
    figure = kernels.input_kernels([s.kernel() for s in signals], [(str(s.repeat_rate), "") for s in signals], HEADING)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == len(studies.TOKEN_RATES)
    np.testing.assert_array_equal(panels[0].images[0].get_array(), np.eye(15))


def test_diagonal_by_depth_shows_mean_and_spread() -> None:
    diagonals = {"without": np.linspace(1, 3, 12).reshape(4, 3), "with": np.ones((4, 3))}
    axes = kernels.diagonal_by_depth(diagonals, HEADING).axes[0]
    means = [line.get_ydata() for line in axes.lines[:2]]
    np.testing.assert_allclose(means, [diagonal.mean(axis=1) for diagonal in diagonals.values()])
    assert len(axes.collections) == 2


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_rendering_is_repeatable(rows, suffix: str, start: bytes) -> None:
    first = render(kernels.kernel_grid(rows[:1], HEADING), suffix)
    assert first.startswith(start)
    assert first == render(kernels.kernel_grid(rows[:1], HEADING), suffix)


def test_global_settings_are_left_alone(rows) -> None:
    before = matplotlib.rcParams["font.size"]
    assert before != STYLE["font.size"]
    render(kernels.kernel_grid(rows[:1], HEADING), ".png")
    assert matplotlib.rcParams["font.size"] == before
