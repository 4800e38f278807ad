"""What is seen of a trained run besides its losses: kernels against theory, and zero-shot accuracy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skipless.model.config import ModelConfig
from skipless.model.signal import kernel_blocks
from skipless.recipes.reproduce.job import Job
from skipless.recipes.reproduce.stages import pack, read_stage
from skipless.theory import kernels, propagation
from skipless.train.subject import load_subject
from skipless.train.tasks import TASKS, local_records, questions, score_tasks, task_file

NEAR = 4  # locations at most so far apart are neighbours


def measured(job: Job, folder: Path, tasks: Path | None, device: str) -> dict[str, Any]:
    """The job's measures, and its kernels where it has probes, from the folder of its finished run."""
    if job.measure == "probes":
        stages = {step: read_stage(folder / "probes", step) for step in job.experiment.train.probe_at}
        return {"measures": kernel_measures(job.experiment.model, list(stages.values())), "kernels": pack(stages)}
    if job.measure == "tasks":
        return {"measures": task_measures(folder, tasks, device)}
    return {}


def kernel_measures(model: ModelConfig, stages: Sequence[np.ndarray]) -> dict[str, float]:
    """Fig. 15 in numbers: how well theory predicts the kernels at step 0, and how much neighbours stand out.

    stages: (L+1, T, T) kernels before, in the middle of and after training.
    """
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


def task_measures(folder: Path, tasks: Path | None, device: str) -> dict[str, float]:
    """Accuracy on each task in per cent, and their mean."""
    if tasks is None:
        raise ValueError("zero-shot accuracy needs --tasks-folder, the folder of the tasks' .jsonl files")
    subject = load_subject(folder)
    subject.model.to(device)
    asked = {name: questions(name, local_records(name, tasks), file=task_file(name, tasks)) for name in TASKS}
    length = subject.model.config.length
    scores = score_tasks(subject.model, subject.tokenizer, asked, length=length)
    values = {name: 100.0 * score.accuracy for name, score in scores.items()}
    return {**values, "mean_accuracy": sum(values.values()) / len(values)}


def _recency(cosines: np.ndarray) -> float:
    places = np.arange(cosines.shape[1])
    apart = np.abs(places[:, None] - places[None])
    near, far = (apart > 0) & (apart <= NEAR), apart > NEAR
    return float(cosines[:, near].mean() - cosines[:, far].mean())
