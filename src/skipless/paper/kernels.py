"""The table that trains nothing: what the paper says of Fig. 1, 5, 6 and 7, held against theory in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skipless.inspection import studies
from skipless.inspection.studies import Study, study
from skipless.paper.experiments import PaperTable
from skipless.paper.tables import markdown_table
from skipless.theory.kernels import mean_cosine


@dataclass(frozen=True)
class Check:
    """One statement about a figure, what was computed, and whether it holds."""

    where: str
    claim: str
    ours: str
    holds: bool


# Sec. 1, App. B and G: which rows of Fig. 7 keep the signal over 100 blocks.
_SURVIVES = {
    "Standard": False,
    "U-SPA": True,
    "E-SPA": True,
    "Skipless + LN": False,
    "Pre-LN": True,
    "Pre-LN, α = 0.98": True,
    "Post-LN": False,
}
_IN_FIG_1 = ("Standard", "U-SPA", "E-SPA")
# Diagonal at the last location without the correction, from the closed form of App. B in 66-digit arithmetic.
_DRIFT = 4.78


def kernel_checks() -> list[Check]:
    """All statements, computed anew: seconds."""
    rows = [study(network, studies.SIGNAL) for network in studies.networks()]
    return [*(_survival(row) for row in rows), _uniform(rows[1]), _slower(rows), *_inputs(), *_corrections()]


def _survival(row: Study) -> Check:
    label, verdict = row.network.label, row.certificate.verdict
    kept = _SURVIVES[label]
    words = f"{verdict.words}, mean cosine {row.certificate.reports[-1].mean_cosine:.4f}"
    where = "Fig. 1 and 7" if label in _IN_FIG_1 else "Fig. 7"
    claim = f"{label}: the signal {'survives' if kept else 'is lost within'} {studies.DEPTH} blocks"
    return Check(where, claim, words, verdict.lost is not kept)


def _uniform(row: Study) -> Check:
    found = row.certificate.reports[-1].mean_cosine
    claim = f"U-SPA: cosines end at ρ_L = {studies.RHO_FINAL}"
    return Check("Fig. 1 and 7", claim, f"{found:.4f}", abs(found - studies.RHO_FINAL) < 0.02)


def _slower(rows: list[Study]) -> Check:
    by_label = {row.network.label: row.certificate.reports[-1].mean_cosine for row in rows}
    usual, weighted = by_label["Pre-LN"], by_label["Pre-LN, α = 0.98"]
    claim = "Pre-LN's cosines rise faster with depth than those with α = 0.98"
    half = studies.DEPTH // 2
    early = {row.network.label: row.certificate.reports[half].mean_cosine for row in rows}
    holds = early["Pre-LN"] > early["Pre-LN, α = 0.98"]
    words = (
        f"block {half}: {early['Pre-LN']:.3f} and {early['Pre-LN, α = 0.98']:.3f}; end: {usual:.3f} and {weighted:.3f}"
    )
    return Check("Fig. 7", claim, words, holds)


def _inputs() -> list[Check]:
    checks = []
    for signal in studies.token_signals():
        found = mean_cosine(signal.kernel())
        claim = f"inputs with r = {signal.repeat_rate:g}: that share of pairs is equal"
        checks.append(Check("Fig. 5", claim, f"{found:.4f}", abs(found - signal.repeat_rate) < 0.01))
    return checks


def _corrections() -> list[Check]:
    plain, corrected = (study(network, studies.CORRECTION_SIGNAL) for network in studies.correction_networks())
    drift, kept = (float(each.diagonals()[-1].mean()) for each in (plain, corrected))
    mean_input = replace(studies.CORRECTION_SIGNAL, kind="average")
    average = float(study(plain.network, mean_input).diagonals()[-1][-1])
    return [
        Check("Fig. 6", "uncorrected, the mean diagonal grows with depth", f"{drift:.2f}", drift > 1.5),
        Check("Fig. 6", "corrected, it stays near 1", f"{kept:.2f}", abs(kept - 1.0) < 0.25),
        Check(
            "ours, by App. B",
            f"uncorrected, over the mean input, the last location reaches {_DRIFT}",
            f"{average:.2f}",
            abs(average - _DRIFT) < 0.01,
        ),
    ]


def kernels_page(table: PaperTable, checks: Sequence[Check], figure: str = "") -> str:
    """The page of the table that trains nothing."""
    lines = [(c.where, c.claim, c.ours, "pass" if c.holds else "**fail**") for c in checks]
    picture = f"![Kernels by depth]({figure})\n" if figure else ""
    body = markdown_table(("figure", "claim", "ours", "verdict"), lines)
    return "\n".join(
        part for part in (f"# {table.title}\n", f"{table.reference}. {table.note}\n", picture, body) if part
    )
