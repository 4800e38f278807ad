"""The picture of a `skipless kernels` request. Imports matplotlib, an optional package."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from skipless.analysis import figures
from skipless.analysis.figures import GridRow, Heading
from skipless.analysis.study import InputSignal, Study
from skipless.cli.kernel_request import Request

_CORPORA = {0.0: "every token once", 0.008: "32k SentencePiece", 0.02: "Fig. 1 and 7", 0.05: "characters"}


def draw(request: Request, studies: Sequence[Study]) -> Figure:
    """Fig. 5, Fig. 6, a grid of networks, or one network's portrait."""
    if not studies:
        return _inputs(request.signals)
    if request.name == "fig6":
        return _diagonals(studies)
    rows = [_row(study, request.blocks) for study in studies]
    if len(studies) == 1:
        return figures.network_portrait(rows[0], studies[0].certificate, _portrait_heading(studies[0]))
    size = f"{request.depth} blocks, {studies[0].network.config.heads} heads"
    subtitle = f"Attention-only transformers at initialisation, {size}; {request.signals[0].describe()}"
    return figures.kernel_grid(rows, Heading("Where the signal survives, and where it dies", subtitle))


def _row(study: Study, blocks: Sequence[int]) -> GridRow:
    cosines = {block: study.normalised(block) for block in blocks}
    return GridRow(study.network.label, study.network.details(), cosines, study.certificate.verdict)


def _portrait_heading(study: Study) -> Heading:
    config = study.network.config
    kind = "blocks" if config.hidden else "attention-only blocks"
    subtitle = f"{', '.join(study.network.details())}; {study.signal.describe()}"
    return Heading(f"{study.network.label}, {config.depth} {kind}", subtitle)


def _inputs(signals: Sequence[InputSignal]) -> Figure:
    captions = [(f"r = {s.repeat_rate:g}", _CORPORA.get(s.repeat_rate, "")) for s in signals]
    subtitle = f"Input kernels of sequences of {signals[0].length} locations, by the probability r of a repeat"
    heading = Heading("Repeated tokens are similar from the start", subtitle)
    return figures.input_kernels([s.kernel() for s in signals], captions, heading)


def _diagonals(studies: Sequence[Study]) -> Figure:
    network, signal = studies[0].network, studies[0].signal
    setting = f"Attention-only E-SPA, {network.details()[0]}; {signal.describe()};"
    heading = Heading(
        "Uncorrected, repeated tokens inflate norms", f"{setting}\nmean ± standard deviation over locations"
    )
    return figures.diagonal_by_depth({s.network.label: s.diagonals() for s in studies}, heading)
