"""Tables of our own on what networks without skips and norms are good for: few bits, blocks that all work, activations
that need not be stored. Pre-LN at an equal budget is the control, and every network is trained by Adam and by Muon.

All three tables look at the same runs, those of `mirrored` at their best rates: a run is asked for all of it at once.

Their claims were written before any run at this size. What they rest on: at width 64, with one seed, nf4 had cost E-SPA
.36 nats and a network with skips and norms .08, and rounding is known to grow with depth without skips, so Pre-LN is
claimed to bear few bits better. That Muon removes outliers, and that there are fewer without norms, are guesses. A
block of a mirrored network rotates the stream, so that what follows cannot do without it; Pre-LN's only adds to it. So
dropping one is claimed to cost more, and 36 blocks to gain more over 27. At its start a mirrored network of 36 blocks ×
96 can be run backwards in float32 to 7e-6 of its input (inspection/inverse.py, on a CPU); Pre-LN's first block cannot.

Seen after the claims were written, on a CPU (24 blocks × 64, 300 steps of bytes by Muon, one seed, Pre-LN second):
nf4 .36 and .002 nats, folded .10; int8 .001 and 0; one block dropped 3.1 and .08; the worst block alone backwards .18
and 21, the median one .04 and 6e-8. What starts invertible does not stay so. In float64 the MLPs do, with a condition
number of 2, and attention does not: in two early blocks another input, 7 % away, gives the same output to 3e-10.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skipless.paper import mirrored
from skipless.paper.claims import Below, Claim, Lower, Match, SmallerGap
from skipless.paper.experiments import Arm, Optimizer, PaperTable
from skipless.paper.runs import Run

KINDS = ("pre-ln", "e-spa-skip", "e-spa", "mirrored")
WAYS: tuple[Optimizer, ...] = ("adam", "muon")
FORMATS = (  # the names of skipless.model.quantise, which needs torch
    "int8",
    "int8-tensor",
    "int8-weights",
    "int8-weights-tensor",
    "int4-weights",
    "int4-weights-tensor",
    "nf4",
    "fp8",
    "fp8-tensor",
)
STUDY_TOKENS = 16_384  # of validation at most, for every loss of a study


def _arms() -> tuple[Arm, ...]:
    return tuple(replace(mirrored.ARMS[way][kind], seeds=None) for way in WAYS for kind in KINDS)


def _shallower(way: Optimizer, kind: str) -> Arm:
    """A network of 27 blocks at the rates of 36."""
    arm = mirrored.ARMS[way][kind]
    changes = {**arm.changes, "depth": 27}
    name, label = f"{kind}-27/{way}", f"{arm.label}, 27 blocks"
    return replace(arm, name=name, label=label, changes=changes, follows=arm.name, depth_power=0.0, seeds=None)


def _table(
    name: str,
    title: str,
    arms: tuple[Arm, ...],
    claims: tuple[Claim, ...],
    quantities: tuple[str, ...],
    note: str,
    profiles: tuple[str, ...] = (),
) -> PaperTable:
    return PaperTable(
        name,
        title,
        "beyond the paper, which asks how they train",
        arms,
        claims,
        quantities=quantities,
        measure="uses",
        embedding_rates=mirrored.EMBEDDING_RATES,
        side_by_side=True,
        profiles=profiles,
        note=note,
    )


LOW_BITS = _table(
    "low-bits",
    "Loss after rounding matrices and activations to few bits",
    _arms(),
    (
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "nf4_rise") for way in WAYS),
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "int8_rise") for way in WAYS),
        *(Match(f"mirrored/{way}", f"pre-ln/{way}", 0.01, "int8-weights_rise") for way in WAYS),
        Lower("pre-ln/muon", "pre-ln/adam", 0.0, "kurtosis"),
        Lower("mirrored/adam", "pre-ln/adam", 0.0, "kurtosis"),
        Lower("e-spa-skip/adam", "mirrored/adam", 0.0, "nf4_rise"),
    ),
    (
        "valid_loss",
        *(f"{name}_rise" for name in FORMATS),
        *(f"folded_{name}_rise" for name in ("int8", "int4-weights", "nf4", "fp8")),
        "kurtosis",
        "largest",
    ),
    "Rises of the loss in nats, round to nearest, no calibration: `skipless eval RUN --quantise NAME`. int8 and fp8 "
    "round activations too (W8A8), -weights only weights (W8A16, W4A16); -tensor has one scale a tensor. Folded: after "
    "neighbouring matrices were merged, where that is possible. Kurtosis (a normal distribution has 3) and largest "
    "(over the root mean square) are of what enters the matrices, the worst block's.",
)

BLOCKS = _table(
    "blocks",
    "Do all blocks work? One dropped, two swapped, read after each; 27 against 36",
    (*_arms(), *(_shallower(way, kind) for way in WAYS for kind in ("pre-ln", "mirrored"))),
    (
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.5, "drop_rise") for way in WAYS),
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "swap_rise") for way in WAYS),
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "half_way_rise") for way in WAYS),
        *(
            SmallerGap((f"pre-ln/{way}", f"pre-ln-27/{way}"), (f"mirrored/{way}", f"mirrored-27/{way}"), "valid_loss")
            for way in WAYS
        ),
    ),
    ("valid_loss", "drop_rise", "drop_rise_least", "swap_rise", "swap_rise_least", "half_way_rise"),
    "Rises of the loss in nats, the mean over blocks (pairs of neighbours), and that of the block it costs least. "
    "Half-way: the next token read after half of the blocks, by a linear map onto the last block's output, fitted by "
    "least squares, and the network's own unembedding. Networks of 27 blocks have the rates of 36.",
    profiles=("readout_rise",),
)

BACKWARDS = _table(
    "backwards",
    "Activations recomputed backwards instead of stored",
    _arms(),
    (
        *(Below(f"mirrored/{way}", "start_chain", 1e-3) for way in WAYS),
        *(Below(f"mirrored/{way}", "end_alone", 1e-2) for way in WAYS),
        *(Lower(f"mirrored/{way}", f"pre-ln/{way}", 0.0, "end_chain") for way in WAYS),
    ),
    ("valid_loss", "start_alone", "start_chain", "end_alone", "end_chain"),
    "Relative errors in float32, before and after training. Alone: the input of a block found from its own output, the "
    "worst block's; chain: the input of the first block found from the output of the last, through all of them. At "
    "most 20 sweeps a sub-block (inspection/inverse.py).",
    profiles=("end_chained",),
)


def use_measures(run: Run, folder: Path, device: str) -> dict[str, Any]:
    """What the three tables show of a finished run, and its numbers by block."""
    import torch

    from skipless.model.transformer import Transformer
    from skipless.training.load import load_model

    loaded, train = load_model(folder, device=device), run.experiment.train
    model = Transformer(loaded.model.config, impl="sdpa").to(device).eval()
    rows, fitted = (_rows(str(loaded.validation), split, train, device) for split in ("valid", "train"))
    torch.manual_seed(train.seed)
    start = _backwards(model, rows[:2, :-1])
    model.load_state_dict(loaded.model.state_dict())
    end = _backwards(model, rows[:2, :-1])
    measures, by_block = _losses(model, rows, fitted)
    for name, found in (("start", start), ("end", end)):
        measures |= {f"{name}_alone": max(found["alone"]), f"{name}_chain": found["chained"][0]}
        by_block |= {f"{name}_{kind}": errors for kind, errors in found.items()}
    return {"measures": measures, "by_block": by_block}


def _rows(folder: str, split: str, train: Any, device: str) -> Any:
    """Rows of T+1 tokens, as many as make STUDY_TOKENS, or fewer where validation has fewer."""
    from skipless.data.loader import TokenLoader
    from skipless.data.store import TokenStore

    count = max(min(STUDY_TOKENS, train.eval_tokens) // train.length, 2)
    loader = TokenLoader(TokenStore(folder, split), train.length, count)
    with loader.sweep() as batches:
        return next(iter(batches)).tokens.to(device)


def _losses(model: Any, rows: Any, fitted: Any) -> tuple[dict[str, float], dict[str, list[float]]]:
    from skipless.inspection import ablation
    from skipless.model.fold import check_foldable, fold

    loss = ablation.text_loss(model, rows)
    measures = {f"{name}_rise": ablation.quantised_loss(model, rows, name) - loss for name in FORMATS}
    try:
        check_foldable(model.config)
    except ValueError:
        pass
    else:
        folded = fold(model)
        rises = {name: ablation.quantised_loss(folded, rows, name) - loss for name in FORMATS}
        measures |= {f"folded_{name}_rise": rise for name, rise in rises.items()}
    worst = ablation.outliers(model, rows)
    by_block = {
        "kurtosis": [each.kurtosis for each in worst],
        "largest": [each.largest for each in worst],
        "drop_rise": [each - loss for each in ablation.dropped_losses(model, rows)],
        "swap_rise": [each - loss for each in ablation.swapped_losses(model, rows)],
        "readout_rise": [each - loss for each in ablation.readout_losses(model, fitted, rows)],
    }
    measures |= {name: max(by_block[name]) for name in ("kurtosis", "largest")}
    for name in ("drop_rise", "swap_rise"):
        measures |= {name: _mean(by_block[name]), f"{name}_least": min(by_block[name])}
    measures["half_way_rise"] = by_block["readout_rise"][len(worst) // 2]
    return measures, by_block


def _backwards(model: Any, tokens: Any) -> dict[str, list[float]]:
    """Errors by block; none can be had where a norm or gains stand in the way."""
    from skipless.inspection.inverse import recomputed

    found = recomputed(model, tokens)
    return {"alone": list(found.alone), "chained": list(found.chained)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
