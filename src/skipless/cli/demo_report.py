"""What `skipless demo` says of its three networks: the table, the closing sentence, the data and the picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skipless import __version__
from skipless.analysis.study import verdict_words
from skipless.recipes.demo import E_SPA, STANDARD, Counting
from skipless.recipes.demo_outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A network within this many nats of symbol frequencies has learned nothing of its context.
NOTHING = 0.1


def table(outcomes: Sequence[Outcome], reference: Counting) -> tuple[list[str], list[list[str]], list[str]]:
    """Head, rows and the colour of each row's last cell; the last row is the reference."""
    tail = outcomes[0].tail
    training = f"training loss (mean of last {tail})" if tail > 1 else "training loss (last step)"
    head = ["network", "skips", "norms", training, "valid bits/byte", "signal at initialisation"]
    rows = [
        [o.arm.label, o.arm.skips, o.arm.norms, f"{o.final:.2f}", f"{o.valid_bits:.2f}", verdict_words(o.verdict)]
        for o in outcomes
    ]
    rows.append(["counting symbols", "", "", f"{reference.train:.2f}", f"{reference.valid_bits:.2f}", ""])
    colours = {"preserved": "green", "drift": "yellow"}
    return head, rows, [*(colours.get(o.verdict.kind, "red") for o in outcomes), ""]


def closing(outcomes: Sequence[Outcome], reference: Counting) -> str:
    """Who has learned something: said from the numbers alone."""
    sentences = [f"{outcome.arm.label} {_learned(reference.train - outcome.final)}." for outcome in outcomes]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _learned(gain: float) -> str:
    if gain > NOTHING:
        return f"is {gain:.2f} nats per byte better than counting symbols"
    if gain > -NOTHING:
        return "is no better than counting symbols"
    return f"is {-gain:.2f} nats per byte worse than counting symbols"


def title(outcomes: Sequence[Outcome], reference: Counting) -> str:
    """The picture's headline, which claims no more than the numbers show."""
    depth = outcomes[0].arm.experiment.model.depth
    learned = {outcome.arm.name: reference.train - outcome.final > NOTHING for outcome in outcomes}
    if learned[E_SPA] and not learned[STANDARD]:
        return f"{depth} blocks without skips: E-SPA learns, standard attention does not"
    return f"{depth} blocks, with and without skips"


def as_json(outcomes: Sequence[Outcome], reference: Counting) -> dict[str, Any]:
    """Every number of the table and the curves."""
    return {
        "skipless": __version__,
        "counting": {"training_loss": reference.train, "valid_bits_per_byte": reference.valid_bits},
        "networks": [
            {
                "name": outcome.arm.name,
                "label": outcome.arm.label,
                "skips": outcome.arm.skips,
                "norms": outcome.arm.norms,
                "training_loss": outcome.final,
                "training_loss_steps": outcome.tail,
                "valid_bits_per_byte": outcome.valid_bits,
                "verdict": verdict_words(outcome.verdict),
                "losses": [round(float(loss), 4) for loss in outcome.losses],
            }
            for outcome in outcomes
        ],
    }


def _details(outcome: Outcome) -> str:
    return f"skips: {outcome.arm.skips}\nnorms: {outcome.arm.norms}"


def draw(outcomes: Sequence[Outcome], reference: Counting) -> "Figure":
    """The picture of all three."""
    from skipless.analysis.demo_figure import ArmPicture, demo_picture
    from skipless.analysis.figures import Heading

    model, schedule = outcomes[0].arm.experiment.model, outcomes[0].arm.experiment.train
    tokens = schedule.steps * schedule.batch_size * schedule.length
    subtitle = (
        f"{model.depth} blocks × {model.width}, bytes of Python's standard library: {schedule.steps} steps of "
        f"{schedule.batch_size} × {schedule.length}, {tokens / 1e3:,.0f} thousand bytes, the same for all"
    )
    pictures = [
        ArmPicture(o.arm.label, _details(o), o.losses, o.final, o.initial, o.trained, o.verdict) for o in outcomes
    ]
    return demo_picture(pictures, reference.train, Heading(title(outcomes, reference), subtitle))
