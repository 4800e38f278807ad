"""The five downstream tasks of the paper, scored here, and the same model inside lm-eval.

A choice's score is the log-likelihood of its text after the question, and the answer is the choice of highest score:
accuracy. Normalised accuracy divides scores by the choices' lengths in characters. Only the model is needed here.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from skipless.data.formats import COMPRESSIONS, opened
from skipless.data.text import hub_datasets
from skipless.data.tokenizer import Tokenizer
from skipless.files import parse_json, reading
from skipless.model.transformer import Transformer
from skipless.schema import check
from skipless.training.config import Precision
from skipless.training.evaluate import Row, check_vocabulary, config_of, scoring


@dataclass(frozen=True)
class Question:
    """Pairs of (context, continuation), one per choice; `gold` is the right one.

    lengths are the characters of each choice, for normalised accuracy; None where choices differ in their context and
    not in what is scored.
    """

    pairs: tuple[tuple[str, str], ...]
    gold: int
    lengths: tuple[int, ...] | None = None

    @classmethod
    def ask(cls, prompt: str, choices: Sequence[str], gold: int) -> "Question":
        """One prompt, and choices that follow it after a space, which their lengths do not count."""
        return cls(tuple((prompt, f" {choice}") for choice in choices), gold, tuple(map(len, choices)))


@dataclass(frozen=True)
class Task:
    """How a record of the hub's data set becomes a Question of so many choices.

    stem names the local file, stock the task's description within lm_eval/tasks.
    """

    stem: str
    hub: tuple[str, str | None]
    choices: int
    question: Callable[[dict[str, Any]], Question]
    stock: str


@dataclass(frozen=True)
class TaskResult:
    """Accuracies with their standard errors √(p(1−p)/(n−1)), which one question alone does not have.

    normalised is None where the task has no such score. truncated counts the pairs that were longer than the model's
    length and lost the start of their context; it is None where lm-eval did the work, which does not say.
    """

    task: str
    questions: int
    accuracy: float
    accuracy_stderr: float | None
    normalised: float | None
    normalised_stderr: float | None
    truncated: int | None = None

    @property
    def chance(self) -> float:
        """What guessing gives."""
        return 1.0 / TASKS[self.task].choices


def _text(record: Mapping[Any, Any], name: Any) -> str:
    """A field that must be text, which a list or a number would silently become in a prompt."""
    text = check(record[name], str, str(name))
    text.encode()  # no half of a surrogate pair
    return text


def _boolq(record: dict[str, Any]) -> Question:
    label = record["answer"] if "answer" in record else record["label"]  # BoolQ's own field, and SuperGLUE's
    prompt = f"{_text(record, 'passage')}\nQuestion: {_text(record, 'question')}?\nAnswer:"
    return Question.ask(prompt, ("no", "yes"), _gold(label, 2))


def _gold(label: Any, choices: int, first: int = 0) -> int:
    """The place of the choice that a label names: a number counted from `first`, its text, or a bool."""
    for place, name in enumerate(range(first, first + choices)):
        if label == name or label == str(name):
            return place
    names = ", ".join(map(str, range(first, first + choices)))
    raise ValueError(f"the label of the right answer is {label!r}; it must be one of {names}")


def _hellaswag(record: dict[str, Any]) -> Question:
    before, start = f"{_text(record, 'activity_label')}: {_text(record, 'ctx_a')}", _text(record, "ctx_b")
    prompt = f"{before} {start.capitalize()}"
    numbered = dict(enumerate(check(record["endings"], list[str], "endings")))
    endings = [_without_brackets(_text(numbered, place)) for place in numbered]
    return Question.ask(_without_brackets(prompt), endings, _gold(record["label"], len(endings)))


def _without_brackets(text: str) -> str:
    """WikiHow's marks taken out, as lm-eval does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _winogrande(record: dict[str, Any]) -> Question:
    """What follows the gap is scored after each of the two fillings (Trinh & Le 2018)."""
    before, gap, after = _text(record, "sentence").partition("_")
    if not gap:
        raise ValueError(f"the sentence has no gap '_': {record['sentence']!r}")
    options = (_text(record, "option1"), _text(record, "option2"))
    pairs = tuple((before + option, f" {after.strip()}") for option in options)
    return Question(pairs, _gold(record["answer"], 2, first=1))


def _piqa(record: dict[str, Any]) -> Question:
    choices = (_text(record, "sol1"), _text(record, "sol2"))
    return Question.ask(f"Question: {_text(record, 'goal')}\nAnswer:", choices, _gold(record["label"], 2))


def _siqa(record: dict[str, Any]) -> Question:
    choices = tuple(_text(record, name) for name in ("answerA", "answerB", "answerC"))
    prompt = f"Q: {_text(record, 'context')} {_text(record, 'question')}\nA:"
    return Question.ask(prompt, choices, _gold(record["label"], 3, first=1))


TASKS: dict[str, Task] = {
    "boolq": Task("boolq", ("aps/super_glue", "boolq"), 2, _boolq, "super_glue/boolq/default.yaml"),
    "hellaswag": Task("hellaswag", ("Rowan/hellaswag", None), 4, _hellaswag, "hellaswag/hellaswag.yaml"),
    "winogrande": Task(
        "winogrande", ("allenai/winogrande", "winogrande_xl"), 2, _winogrande, "winogrande/default.yaml"
    ),
    "piqa": Task("piqa", ("baber/piqa", None), 2, _piqa, "piqa/piqa.yaml"),
    "siqa": Task("social_i_qa", ("lighteval/siqa", None), 3, _siqa, "siqa/siqa.yaml"),
}


def task_names(text: str) -> list[str]:
    """The tasks that "all" or "boolq,piqa" means."""
    if text == "all":
        return [*TASKS]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"no task {name!r}; there are {', '.join(TASKS)}, and 'all' for all of them")
    if not names:
        raise ValueError(f"{text!r} names no task; there are {', '.join(TASKS)}, and 'all' for all of them")
    return names


def task_file(name: str, folder: str | Path) -> Path:
    """The file of a task in a folder: <stem>.validation.jsonl or <stem>.jsonl, plain or packed."""
    stems = dict.fromkeys((TASKS[name].stem, name))
    wanted = [
        f"{stem}{middle}.jsonl{end}" for stem in stems for middle in (".validation", "") for end in ("", *COMPRESSIONS)
    ]
    for file in wanted:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ValueError(f"{folder} has no {wanted[0]} (nor with .gz, .xz or .zst): give the folder of the tasks' files")


def local_records(name: str, folder: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a task's local file, in order."""
    path = task_file(name, folder)
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = parse_json(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a {type(record).__name__}, not an object")
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON record: {error}") from error
            yield record


def hub_records(name: str, download: bool) -> Iterator[dict[str, Any]]:
    """The validation split of a task's data set on the Hugging Face hub, if going to the network is allowed."""
    repository, configuration = TASKS[name].hub
    if not download:
        raise ValueError(
            f"{name} is on the Hugging Face hub as {repository}, and no network is used unless asked for: give the "
            "folder of local files with --tasks-folder, or add --download"
        )
    yield from hub_datasets(name).load_dataset(repository, configuration, split="validation")


def questions(
    name: str, records: Iterator[dict[str, Any]], limit: int | None = None, file: Path | None = None
) -> list[Question]:
    """The first `limit` records, or all, as questions. file is whose lines they are, for errors to name."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all")
    asked = []
    for number, record in enumerate(islice(records, limit), 1):
        where = f"{name}, record {number}" if file is None else f"{file}, line {number}"
        try:
            asked.append(TASKS[name].question(record))
        except KeyError as error:
            raise ValueError(
                f"{where} lacks the field {error.args[0]!r}; fields must be named as in "
                f"{TASKS[name].hub[0]} on the hub, and here are {', '.join(record)}"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is no question of {name}: {error}") from error
    if not asked:
        raise ValueError(f"{file or name} has no records")
    return asked


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[np.ndarray, int]:
    """The tokens of both together, and how many are the continuation's.

    Spaces at the end of the context go to the continuation, since a token may begin with them.
    """
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    whole = tokenizer.encode(context + continuation)
    scored = len(whole) - len(tokenizer.encode(context))
    if not 0 < scored < len(whole):
        raise ValueError(
            f"{continuation!r} after {context[-40:]!r} leaves {scored} of {len(whole)} tokens to score; both context "
            "and continuation must have one of their own"
        )
    return whole, scored


def score_tasks(
    model: nn.Module,
    tokenizer: Tokenizer,
    asked: dict[str, list[Question]],
    *,
    length: int | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    done: Callable[[TaskResult], None] | None = None,
) -> dict[str, TaskResult]:
    """The result of each task. length bounds the tokens a model sees at once: by default its training length.

    `done` hears of each result as it comes.
    """
    check_vocabulary(model, tokenizer)
    length = config_of(model).length if length is None else length
    results = {}
    for name, each in asked.items():
        with reading(name, what="cannot be scored"):
            rows = [pair_row(tokenizer, *pair, length) for question in each for pair in question.pairs]
        with scoring(model, device, precision) as scorer:
            scores = scorer.row_log_likelihoods([row for row, _ in rows])
        results[name] = result_of(name, each, scores, sum(cut for _, cut in rows))
        if done:
            done(results[name])
    return results


def result_of(name: str, asked: Sequence[Question], scores: np.ndarray, truncated: int | None) -> TaskResult:
    """Accuracies from the scores of all pairs, question after question."""
    if bad := int(np.isnan(scores).sum()):
        raise ValueError(f"{name}: {bad} of {len(scores)} log-likelihoods are not a number: the model has diverged")
    plain, normalised, start = [], [], 0
    for question in asked:
        own = scores[start : start + len(question.pairs)]
        start += len(own)
        plain.append(int(np.argmax(own)) == question.gold)
        if question.lengths is not None:
            per_character = [
                score / size if size else -math.inf for score, size in zip(own, question.lengths, strict=True)
            ]
            normalised.append(int(np.argmax(per_character)) == question.gold)
    return TaskResult(name, len(asked), *_mean(plain), *_mean(normalised), truncated)


def _mean(right: Sequence[bool]) -> tuple[Any, float | None]:
    if not right:
        return None, None
    p = sum(right) / len(right)
    return p, math.sqrt(p * (1.0 - p) / (len(right) - 1)) if len(right) > 1 else None


def pair_row(tokenizer: Tokenizer, context: str, continuation: str, length: int) -> tuple[Row, bool]:
    """The pair's row, and whether its context was cut from the left to fit."""
    tokens, scored = encode_pair(tokenizer, context, continuation)
    if scored > length:
        raise ValueError(
            f"{continuation[:60]!r}… has {scored} tokens, and the model is to see length={length} at once: use a "
            f"length of at least {scored} (skipless models run beyond the length they were trained at)"
        )
    return Row(tokens[-(length + 1) :], scored), len(tokens) > length + 1


def run_lm_eval(
    model: Transformer,
    tokenizer: Tokenizer,
    names: Sequence[str],
    folder: str | Path | None,
    *,
    limit: int | None = None,
    length: int | None = None,
) -> dict[str, Any]:
    """What lm_eval.simple_evaluate returns, on the device and in the precision of the model's weights.

    Tasks are called skipless_boolq and so on; lm_eval_result reads one. folder holds the local files; None goes to the
    hub. length is as in score_tasks.
    """
    lm_eval = _lm_eval()
    from skipless.hf.modeling import SkiplessForCausalLM

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
    from skipless.hf.tokenizer import fast_tokenizer

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
    settings: dict[str, Any] = {"include": str(stock / TASKS[name].stock), "task": f"skipless_{name}", "tag": None}
    if folder is not None:
        data = scratch / f"{name}.jsonl"
        with opened(task_file(name, folder)) as packed, data.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        settings |= {"training_split": None, "dataset_path": "json", "dataset_name": None}
        settings["dataset_kwargs"] = {"data_files": {"validation": str(data)}, "cache_dir": str(scratch / "cache")}
        if name == "boolq" and "answer" in next(local_records(name, folder)):
            settings["doc_to_target"] = "{{answer|int}}"  # BoolQ's own field; SuperGLUE's is label
    (scratch / f"skipless_{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")


def lm_eval_result(name: str, results: dict[str, Any]) -> TaskResult:
    """One task's part of what run_lm_eval returns."""
    scores = results["results"][f"skipless_{name}"]
    count = results["n-samples"][f"skipless_{name}"]["effective"]

    def of(metric: str) -> Any:
        value = scores.get(f"{metric},none")
        return value if isinstance(value, float) else None

    return TaskResult(name, count, of("acc"), of("acc_stderr"), of("acc_norm"), of("acc_norm_stderr"))
