"""What is measured of a run besides its losses: kernels (Fig. 15), accuracy on tasks (Table 6), its uses."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skipless.model.config import ModelConfig
from skipless.paper.runs import Run
from skipless.theory import kernels, propagation
from skipless.training.run import read_probe

NEIGHBOURS = 4  # locations at most so far apart are neighbours
SIDE = 32  # locations that a record keeps, evenly spaced
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


def measured(run: Run, folder: Path, tasks: Path | None, device: str) -> dict[str, Any]:
    """The run's measures, and its kernels where it has probes, from the folder of its finished run."""
    if run.measure == "probes":
        stages = {step: probe_at(folder, step) for step in run.experiment.train.probe_at}
        return {"measures": kernel_measures(run.experiment.model, list(stages.values())), "kernels": pack(stages)}
    if run.measure == "tasks":
        return {"measures": task_measures(folder, tasks, device)}
    if run.measure == "uses":
        return use_measures(run, folder, device)
    return {}


def probe_at(folder: Path, step: int) -> np.ndarray:
    """(L+1, T, T) kernels of a run before its update `step`."""
    file = folder / "probes" / f"step-{step:08d}.npz"
    if not file.is_file():
        raise ValueError(f"{file} is missing: the run was to be probed at step {step}; train it again")
    return read_probe(file)[1]


def kernel_measures(model: ModelConfig, stages: Sequence[np.ndarray]) -> dict[str, float]:
    """Fig. 15 in numbers: how well theory predicts the kernels at step 0, and how much neighbours stand out.

    stages: (L+1, T, T) kernels before, in the middle of and after training.
    """
    from skipless.model.kernel_maps import kernel_blocks

    cosines = [np.stack([kernels.cosine(state) for state in states[1:]]) for states in stages]
    predicted = propagation.forward(kernel_blocks(model), stages[0][0])
    above = np.triu_indices(stages[0].shape[1], 1)
    theory = np.concatenate([kernels.cosine(kernel)[above] for kernel in predicted[1:]])
    seen = np.concatenate([cosine[above] for cosine in cosines[0]])
    values = {"agreement_with_theory": float(np.corrcoef(theory, seen)[0, 1])}
    for name, stage in zip(("start", "middle", "end"), cosines, strict=True):
        values[f"recency_{name}"] = _recency(stage)
        values[f"cosine_{name}"] = float(np.mean([kernels.mean_cosine(cosine) for cosine in stage]))
    return values


def _recency(cosines: np.ndarray) -> float:
    """The mean cosine of neighbours less that of all other pairs."""
    location = np.arange(cosines.shape[1])
    apart = np.abs(location[:, None] - location[None])
    near, far = (apart > 0) & (apart <= NEIGHBOURS), apart > NEIGHBOURS
    return float(cosines[:, near].mean() - cosines[:, far].mean())


def pack(stages: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Cosines of about SIDE locations after the input, the first, a third, two thirds and the last block, as bytes."""
    depth, length = next(iter(stages.values())).shape[0] - 1, next(iter(stages.values())).shape[1]
    blocks = sorted({0, 1, max(depth // 3, 1), max(2 * depth // 3, 1), depth})
    stride = -(-length // SIDE)
    shown = np.array(
        [[kernels.cosine(states[block])[::stride, ::stride] for block in blocks] for states in stages.values()]
    )
    levels = np.round(255.0 * np.clip(shown, 0.0, 1.0)).astype(np.uint8)
    data = base64.b64encode(levels.tobytes()).decode()
    return {"steps": list(stages), "blocks": blocks, "side": levels.shape[-1], "cosines": data}


def unpack(packed: Mapping[str, Any]) -> dict[int, dict[int, np.ndarray]]:
    """Cosines by step and block."""
    steps, blocks, side = packed["steps"], packed["blocks"], packed["side"]
    levels = np.frombuffer(base64.b64decode(packed["cosines"]), np.uint8)
    shown = levels.reshape(len(steps), len(blocks), side, side) / 255.0
    return {step: dict(zip(blocks, stage, strict=True)) for step, stage in zip(steps, shown, strict=True)}


def task_measures(folder: Path, tasks: Path | None, device: str) -> dict[str, float]:
    """Accuracy on each task in per cent, and their mean."""
    from skipless.training.load import load_model
    from skipless.training.tasks import TASKS, local_records, questions, score_tasks, task_file

    if tasks is None:
        raise ValueError("zero-shot accuracy needs --tasks-folder, the folder of the tasks' .jsonl files")
    loaded = load_model(folder, device=device)
    asked = {name: questions(name, local_records(name, tasks), file=task_file(name, tasks)) for name in TASKS}
    length = loaded.model.config.length
    scores = score_tasks(loaded.model, loaded.tokenizer, asked, length=length)
    values = {name: 100.0 * score.accuracy for name, score in scores.items()}
    return {**values, "mean_accuracy": sum(values.values()) / len(values)}


def other_loss(run: Run, folder: Path, corpus: str, device: str) -> float:
    """The loss per token of a finished run on another text, on as many tokens as it validates on at most."""
    from skipless.training.evaluate import Windowing, evaluate_text
    from skipless.training.load import load_model

    loaded = load_model(folder, device=device)
    windowing, most = Windowing(loaded.length), run.experiment.train.eval_tokens
    return evaluate_text(loaded.model, loaded.tokenizer, corpus, windowing, max_tokens=most).loss


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
        measures |= {f"folded_{name}_rise": ablation.quantised_loss(folded, rows, name) - loss for name in FORMATS}
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
        rises = by_block[name]
        measures |= {name: sum(rises) / len(rises), f"{name}_least": min(rises)}
    measures["half_way_rise"] = by_block["readout_rise"][len(worst) // 2]
    return measures, by_block


def _backwards(model: Any, tokens: Any) -> dict[str, list[float]]:
    """Errors by block."""
    from skipless.inspection.inverse import recomputed

    found = recomputed(model, tokens)
    return {"alone": list(found.alone), "chained": list(found.chained)}
