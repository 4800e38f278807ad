"""The zero-shot tasks through lm-eval (EleutherAI) itself, on local files or on the hub. Needs skipless[eval]."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from skipless.data.files import opened
from skipless.data.tokenizer import Tokenizer
from skipless.model.transformer import Transformer
from skipless.train.pretrained import fast_tokenizer
from skipless.train.tasks import TaskResult, local_records, task_file

# the stock description of each task within lm_eval/tasks
STOCK = {
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "siqa": "siqa/siqa.yaml",
}


def run_lm_eval(
    model: Transformer,
    tokenizer: Tokenizer,
    names: Sequence[str],
    folder: str | Path | None,
    *,
    limit: int | None = None,
    length: int | None = None,
) -> dict[str, TaskResult]:
    """The tasks' results by lm-eval's own code, on the device and in the precision of the model's weights.

    folder holds the local files; None goes to the hub. length is as in score_tasks.
    """
    scores = raw_results(model, tokenizer, names, folder, limit=limit, length=length)
    return {name: result_of(name, scores) for name in names}


def raw_results(
    model: Transformer,
    tokenizer: Tokenizer,
    names: Sequence[str],
    folder: str | Path | None,
    *,
    limit: int | None = None,
    length: int | None = None,
) -> dict[str, Any]:
    """What lm_eval.simple_evaluate returns; tasks are called skipless_boolq and so on."""
    lm_eval = _lm_eval()
    from skipless.hf import SkiplessForCausalLM

    hf_tokenizer, device = as_transformers(tokenizer), model.embedding.weight.device
    lm = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=SkiplessForCausalLM.from_native(model.eval(), hf_tokenizer),
        tokenizer=hf_tokenizer,
        backend="causal",
        batch_size=64 if device.type == "cuda" else 16,
        max_length=length or model.config.length,
        device=str(device),
    )
    with tempfile.TemporaryDirectory(prefix="skipless-lm-eval-") as scratch, torch.no_grad():
        for name in names:
            _describe(name, folder, Path(scratch), Path(lm_eval.__file__).parent / "tasks")
        # without include_defaults=False all of lm-eval's tasks are read first: 40 seconds
        manager = import_module("lm_eval.tasks").TaskManager(include_path=scratch, include_defaults=False)
        return lm_eval.simple_evaluate(
            model=lm,
            tasks=[f"skipless_{name}" for name in names],
            task_manager=manager,
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=1,  # 0 would leave out standard errors; those of means need no bootstrap
        )


def as_transformers(tokenizer: Tokenizer) -> Any:
    """The tokenizer in transformers' form, with an end-of-text token, which lm-eval insists on."""
    inner = fast_tokenizer(tokenizer)
    if inner.eos_token is None:
        inner.eos_token = inner.convert_ids_to_tokens(tokenizer.end)
    return inner


def _lm_eval() -> Any:
    try:
        return import_module("lm_eval")
    except ImportError as error:
        raise ValueError(
            "lm-eval is not installed: pip install 'skipless[eval]', or use the built-in scorer (--backend builtin), "
            "which gives the same accuracies"
        ) from error


def _describe(name: str, folder: str | Path | None, scratch: Path, stock: Path) -> None:
    """Write the task's description, with its data unpacked beside it; JSON is YAML."""
    settings: dict[str, Any] = {"include": str(stock / STOCK[name]), "task": f"skipless_{name}", "tag": None}
    if folder is not None:
        data = scratch / f"{name}.jsonl"
        with opened(task_file(name, folder)) as packed, data.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        settings |= {"training_split": None, "dataset_path": "json", "dataset_name": None}
        settings["dataset_kwargs"] = {"data_files": {"validation": str(data)}, "cache_dir": str(scratch / "cache")}
        if name == "boolq" and "answer" in next(local_records(name, folder)):
            settings["doc_to_target"] = "{{answer|int}}"  # BoolQ's own field; SuperGLUE's is label
    (scratch / f"skipless_{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")


def result_of(name: str, results: dict[str, Any]) -> TaskResult:
    """One task's part of what raw_results returns."""
    scores = results["results"][f"skipless_{name}"]
    count = results["n-samples"][f"skipless_{name}"]["effective"]

    def of(metric: str) -> Any:
        value = scores.get(f"{metric},none")
        return value if isinstance(value, float) else None

    return TaskResult(name, count, of("acc"), of("acc_stderr"), of("acc_norm"), of("acc_norm_stderr"))
