"""`skipless export RUN`: a trained run as a Hugging Face folder that AutoModelForCausalLM loads."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from skipless.data.tokenizer import MODEL_FILE
from skipless.files import writing
from skipless.training.load import load_model
from skipless.training.run import EXPERIMENT, EXPORT


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder; its newest weights are taken.")],
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/export.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A .model file, prepared folder or 'bytes'; by default the run's own.")
    ] = None,
) -> None:
    """Write config, weights (safetensors) and tokenizer of a run for Hugging Face tools."""
    folder = out or run / EXPORT
    _check(folder)
    loaded = load_model(run, tokenizer)
    from skipless.hf.modeling import as_pretrained  # with transformers, which a wrong path need not wait for

    with _aside(folder) as place:
        for part in as_pretrained(loaded.model, loaded.tokenizer):
            part.save_pretrained(place)
        if loaded.tokenizer.model is not None:
            (place / MODEL_FILE).write_bytes(loaded.tokenizer.model)
    print(f"{folder}: AutoModelForCausalLM.from_pretrained loads it after `import skipless`, or with trust_remote_code")


def _check(folder: Path) -> None:
    """Refuse, before any work is done, a place that an export cannot or must not go to."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; an export is a folder: give --out another name")
    if (folder / EXPERIMENT).is_file():
        raise ValueError(f"{folder} is a run, whose weights an export would replace: give --out {folder / EXPORT}")


@contextmanager
def _aside(folder: Path) -> Generator[Path]:
    """A place to write into; once all is written, its files go to `folder`, where other files stay."""
    from safetensors import SafetensorError

    place, again = folder / ".unfinished", "export again"
    with writing(folder, again, room="make room there"):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            yield place
            # the config last: with it a folder is a model
            for file in sorted(place.iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(folder / file.name)
        except SafetensorError as error:
            raise ValueError(f"{folder} could not be written ({error}): make room there, and {again}") from error
        finally:
            shutil.rmtree(place, ignore_errors=True)
