"""`skipless eval`: loss, perplexity and bits per byte of a model on text, and its zero-shot accuracy on tasks."""

import dataclasses
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skipless import __version__
from skipless.cli.app import first_given
from skipless.console import check_target, print_table, print_text, say, write_output
from skipless.data.store import MANIFEST, TokenStore, holds_images
from skipless.data.text import DATASETS, open_corpus
from skipless.files import DATA_MARK
from skipless.inspection.inspection import finite
from skipless.training.config import Precision
from skipless.training.load import LoadedModel, load_image_model, load_model, reads_images

if TYPE_CHECKING:
    from skipless.training.accuracy import ClassResult
    from skipless.training.evaluate import EvalResult
    from skipless.training.tasks import Question, TaskResult


Backend = Literal["builtin", "lm-eval"]  # who scores the tasks


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """How to evaluate, whatever is evaluated. packed: attention within documents, as the run was trained."""

    length: int
    packed: bool
    stride: int | None
    separate: bool
    max_tokens: int | None
    limit: int | None
    device: str
    precision: Precision | None
    download: bool
    quantise: str | None = None


_MOST_CONFUSIONS = 5
_TEXT, _TASKS, _HOW = "Text", "Tasks", "How"


def _option(text: str, panel: str, *names: str):
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one written by save_pretrained.")],
    corpus: Annotated[
        str | None, _option("A file, folder, glob, prepared folder or named corpus (the run's own data).", _TEXT)
    ] = None,
    stride: Annotated[
        int | None, _option("Tokens scored per window; fewer give each more context (all).", _TEXT)
    ] = None,
    separate: Annotated[
        bool, _option("Score each document by itself, not joined as in training.", _TEXT, "--separate")
    ] = False,
    max_tokens: Annotated[int | None, _option("Tokens of text to score (all).", _TEXT)] = None,
    tasks: Annotated[str | None, _option("boolq,hellaswag,winogrande,piqa,siqa, or all.", _TASKS)] = None,
    tasks_folder: Annotated[Path | None, _option("Folder of the tasks' .jsonl files, plain or packed.", _TASKS)] = None,
    limit: Annotated[int | None, _option("Questions per task (all).", _TASKS)] = None,
    backend: Annotated[Backend, _option("Our own scorer (builtin), or lm-eval.", _TASKS)] = "builtin",
    length: Annotated[int | None, _option("Tokens the model sees at once (its training length).", _HOW)] = None,
    tokenizer: Annotated[
        str | None, _option("A .model file, prepared folder or 'bytes' (the model's own).", _HOW)
    ] = None,
    device: Annotated[str | None, _option("cpu, cuda, … (a GPU where there is one).", _HOW)] = None,
    precision: Annotated[Precision | None, _option("bf16, fp16 or fp32 (bf16 on a GPU).", _HOW)] = None,
    quantise: Annotated[
        str | None, _option("Round the blocks' matrices: int8, int8-weights, int4-weights, nf4, fp8, … (not).", _HOW)
    ] = None,
    download: Annotated[bool, _option("Allow the network, for data on the hub.", _HOW, "--download")] = False,
    json_file: Annotated[Path | None, _option("Results as data; - is standard output.", _HOW, "--json")] = None,
) -> None:
    """Evaluate a trained model on text and on zero-shot tasks.

    With neither --corpus nor --tasks: on the validation text of the data the run was trained on. --quantise rounds to
    nearest, and then computes in fp32 unless --precision names another. A network of images is evaluated on held-out
    ones, class by class; of the options it takes --corpus, another folder of prepared images, --device, --precision and
    --json.
    """
    check_target(json_file, DATA_MARK)
    if reads_images(model):
        if given := first_given(context, but=("model", "corpus", "device", "precision", "json_file", "import_")):
            raise ValueError(f"{given} is not for a network of images, which {model} holds; leave it out")
        _images(model, corpus, device, precision, json_file)
        return
    for name, number, without in (
        ("length", length, "the training length"),
        ("max-tokens", max_tokens, "all"),
        ("limit", limit, "all"),
    ):
        if number is not None and number < 1:
            raise ValueError(f"--{name} is {number}; it must be at least 1, or left out for {without}")
    if tasks_folder is not None and not tasks:
        raise ValueError(f"--tasks-folder is {tasks_folder}, and no task is asked for; add --tasks all, or name some")
    if corpus is not None and corpus not in DATASETS and not (Path(corpus) / MANIFEST).is_file():
        open_corpus(corpus)  # a wrong path is refused before anything is loaded
    if quantise is not None:
        from skipless.model.quantise import quantisation

        quantisation(quantise)
        if backend == "lm-eval":
            raise ValueError("--quantise is for the built-in scorer; leave out --backend lm-eval")
        precision = precision or "fp32"
    loaded = load_model(model, tokenizer, device)
    say(f"weights: {loaded.origin}")
    seen, place = loaded.length if length is None else length, str(loaded.model.embedding.weight.device)
    options = EvalOptions(
        seen, loaded.packed, stride, separate, max_tokens, limit, place, precision, download, quantise
    )
    with _rounded(loaded, quantise):
        texts = {} if tasks and corpus is None else _texts(loaded, corpus, options)
        scores = _tasks(loaded, tasks, tasks_folder, backend, options) if tasks else {}
    if json_file is not None:  # before a line that may find its reader gone
        _write(json_file, _record(loaded.origin, options, texts, scores, backend))
    if str(json_file) != "-":
        _print(texts, scores)


def _images(
    model: Path, corpus: str | None, device: str | None, precision: Precision | None, json_file: Path | None
) -> None:
    """Loss and accuracy of a network of images, on all held-out ones of a prepared folder, by default its run's own."""
    from skipless.data.image_loader import ImageLoader
    from skipless.data.image_store import ImageStore
    from skipless.training.accuracy import by_class, evaluate_images
    from skipless.training.feeds import check_images

    loaded = load_image_model(model, device)
    if corpus is None and loaded.validation is None:
        raise ValueError("nothing to evaluate on: this model comes without prepared images; give --corpus")
    if corpus is None and not holds_images(loaded.validation or ""):
        raise ValueError(f"{model} was judged by the images of {loaded.validation}, which are not there; give --corpus")
    store = ImageStore(corpus or loaded.validation or "", "valid")
    check_images(loaded.model.config, store, "give --corpus a folder of images such as the network was trained on")
    if loaded.classes is not None and (theirs := store.manifest.classes) != loaded.classes:
        one, other = next(pair for pair in zip(loaded.classes, theirs, strict=True) if pair[0] != pair[1])
        number = loaded.classes.index(one)
        raise ValueError(
            f"class {number} of {store.folder} is {other!r}, and of {model} {one!r}: right answers would be counted "
            "wrong; give --corpus a folder of the same classes"
        )
    result = evaluate_images(loaded.model, ImageLoader(store, 256), precision=precision)
    assert result.answers is not None
    classes = by_class(result.answers, store.manifest.classes)
    if json_file is not None:
        own = {"images": result.images, "classes": [dataclasses.asdict(each) for each in classes]}
        found = result.numbers() | own
        options = {"device": str(next(loaded.model.parameters()).device), "precision": precision}
        images = {str(store.folder): found}
        _write(json_file, {"skipless": __version__, "weights": loaded.origin, "options": options, "images": images})
    if str(json_file) != "-":
        print(f"{store.folder}: {result.words()}")
        _print_classes(classes)


def _print_classes(results: "list[ClassResult]") -> None:
    """The worst classes, and what is most often taken for what."""
    from rich.console import Console

    from skipless.training.accuracy import class_table, confusions

    console = Console()
    print()
    head, rows = class_table(results)
    print_table(console, head, rows)
    if worst := confusions(results)[:_MOST_CONFUSIONS]:
        listed = ", ".join(f"{name} for {other} ({count:,})" for name, other, count in worst)
        print_text(console, f"\nmost often taken: {listed}", wrap=True)


def _rounded(loaded: LoadedModel, quantise: str | None) -> AbstractContextManager:
    if quantise is None:
        return nullcontext()
    from skipless.model.quantise import quantised

    return quantised(loaded.model.blocks, quantise)


def _texts(loaded: LoadedModel, corpus: str | None, options: EvalOptions) -> "dict[str, EvalResult]":
    """The result on one text, by its name."""
    from skipless.training.evaluate import Windowing, evaluate_text, held_out_texts

    if corpus is None:
        if loaded.validation is None:
            raise ValueError(
                "nothing to evaluate on: this model comes without prepared data, or they have moved; give --corpus or "
                "--tasks"
            )
        corpus = str(loaded.validation)
    if (Path(corpus) / MANIFEST).is_file():
        return {corpus: _prepared(loaded, Path(corpus), options)}
    if options.packed and not options.separate:
        say("attention stays within documents, as the run was trained (data.packed)")
    result = evaluate_text(
        loaded.model,
        loaded.tokenizer,
        held_out_texts(corpus, options.download),
        Windowing(options.length, options.stride, options.separate, packed=options.packed),
        max_tokens=options.max_tokens,
        precision=options.precision,
    )
    return {corpus: result}


def _prepared(loaded: LoadedModel, folder: Path, options: EvalOptions) -> "EvalResult":
    from skipless.data.loader import TokenLoader
    from skipless.training.evaluate import BATCH_TOKENS, evaluate_loss

    if options.stride is not None or options.separate:
        raise ValueError(
            f"--stride and --separate cut text, and {folder} holds tokens; name the text itself with --corpus"
        )
    store = TokenStore(folder, "valid")
    store.check_tokenizer(loaded.tokenizer)
    size = max(1, BATCH_TOKENS // options.length)
    loader = TokenLoader(store, options.length, size, documents=options.packed)
    return evaluate_loss(loaded.model, loader, max_tokens=options.max_tokens, precision=options.precision)


def _tasks(
    loaded: LoadedModel, names: str, folder: Path | None, backend: Backend, options: EvalOptions
) -> "dict[str, TaskResult]":
    from skipless.training.tasks import score_tasks, task_names

    chosen = task_names(names)
    asked = {name: _asked(name, folder, options) for name in chosen}  # what is wrong is said before anything is scored
    if backend == "lm-eval":
        from skipless.training.tasks import lm_eval_result, run_lm_eval

        if options.precision is not None:
            raise ValueError("--precision is for the built-in scorer; lm-eval runs in the precision of the weights")
        limits = {"limit": options.limit, "length": options.length}
        found = run_lm_eval(loaded.model, loaded.tokenizer, chosen, folder, **limits)
        return {name: lm_eval_result(name, found) for name in chosen}
    return score_tasks(
        loaded.model,
        loaded.tokenizer,
        asked,
        length=options.length,
        precision=options.precision,
        done=lambda result: say(f"{result.task}: {result.questions} questions answered"),
    )


def _asked(name: str, folder: Path | None, options: EvalOptions) -> "list[Question]":
    from skipless.training.tasks import hub_records, local_records, questions, task_file

    if folder is None:
        return questions(name, hub_records(name, options.download), options.limit)
    return questions(name, local_records(name, folder), options.limit, task_file(name, folder))


def _print(texts: "dict[str, EvalResult]", scores: "dict[str, TaskResult]") -> None:
    from rich.console import Console

    console = Console()
    if texts:
        head = ("text", "loss", "perplexity", "bits/byte", "tokens", "bytes")
        rows = [
            (
                name,
                _number(r.loss),
                _number(r.perplexity),
                _number(r.bits_per_byte),
                f"{r.tokens:,}",
                f"{r.bytes or 0:,}",
            )
            for name, r in texts.items()
        ]
        print_table(console, head, rows)
    if texts and scores:
        console.print()
    if scores:
        head = ("task", "accuracy", "±", "normalised", "±", "chance", "questions", "truncated")
        rows = [
            (
                name,
                *map(_percent, (r.accuracy, r.accuracy_stderr, r.normalised, r.normalised_stderr, r.chance)),
                f"{r.questions:,}",
                "-" if r.truncated is None else f"{r.truncated:,}",
            )
            for name, r in scores.items()
        ]
        print_table(console, head, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value >= 1000 else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _record(
    origin: str,
    options: EvalOptions,
    texts: "dict[str, EvalResult]",
    scores: "dict[str, TaskResult]",
    backend: Backend,
) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "skipless": __version__,
        "weights": origin,
        "options": dataclasses.asdict(options),
        "texts": {name: dataclasses.asdict(result) for name, result in texts.items()},
        "backend": backend if scores else None,
        "tasks": {name: dataclasses.asdict(r) | {"chance": r.chance} for name, r in scores.items()},
    }


def _write(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(finite(record), indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_output(path, text.encode())
