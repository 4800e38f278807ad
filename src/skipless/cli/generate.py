"""`skipless generate`: text from a run or a saved model, as it comes."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skipless.hf.modeling import SkiplessForCausalLM

_CONTEXT = 6  # tokens decoded again with each new one, since a piece's text depends on its neighbours


def command(
    folder: Annotated[Path, typer.Argument(help="A run folder, or one written by save_pretrained.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue; without it, standard input.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 samples the model as it is.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that sum to p.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the text repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; by default a GPU where there is one.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A .model file, prepared folder or 'bytes'; by default the model's own.")
    ] = None,
    echo: Annotated[bool, typer.Option(help="Write the prompt before its continuation.")] = True,
) -> None:
    """Continue a prompt, writing the text as it comes. Ctrl-C ends it."""
    from skipless.model.generate import Sampling, stream

    sampling = Sampling(temperature, top_k, top_p)
    text = prompt if prompt is not None else _standard_input()
    model, words = load(folder, device, tokenizer)
    tokens = _encode(words, text, model)
    stop = _stop(model)
    new = stream(model.model, tokens, max_new_tokens, sampling=sampling, seed=seed, stop=stop)
    pieces = text_of(words, tokens[0].tolist(), (int(token[0]) for token in new if int(token[0]) not in stop))
    _write(pieces, text if echo else "")


def load(
    folder: Path, device: str | None = None, tokenizer: str | None = None
) -> "tuple[SkiplessForCausalLM, PreTrainedTokenizerBase]":
    """The model, ready to run, and its tokenizer. A run's weights are its newest, whatever was exported before."""
    from transformers.utils import logging

    from skipless.training.distributed import find_device
    from skipless.training.run import EXPERIMENT

    logging.disable_progress_bar()
    place = find_device(device)
    own = tokenizer is None and not (folder / EXPERIMENT).is_file()
    model, words = _saved(folder) if own else _subject(folder, tokenizer)
    return model.to(place), words


def _subject(folder: Path, tokenizer: str | None) -> "tuple[SkiplessForCausalLM, PreTrainedTokenizerBase]":
    from skipless.training.load import as_pretrained, load_trained

    subject = load_trained(folder, tokenizer)
    return as_pretrained(subject.model, subject.tokenizer)


def _saved(folder: Path) -> "tuple[SkiplessForCausalLM, PreTrainedTokenizerBase]":
    from transformers import AutoTokenizer

    from skipless.training.load import read_pretrained

    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} is no run and holds no {name}; give a run, or a folder that `skipless export RUN` or "
                "save_pretrained wrote, with its tokenizer"
            )
    tokenizer = cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    return read_pretrained(folder), tokenizer


def text_of(tokenizer: "PreTrainedTokenizerBase", prompt: list[int], new: Iterable[int]) -> Iterator[str]:
    """The text each new token adds. Tokens that end inside a character wait for the next ones."""

    def decoded(first: int, last: int) -> str:
        return str(tokenizer.decode(ids[first:last], skip_special_tokens=True))

    ids = list(prompt)
    start, done = max(len(ids) - _CONTEXT, 0), len(ids)
    for token in new:
        ids.append(token)
        before, after = decoded(start, done), decoded(start, len(ids))
        if len(after) > len(before) and not after.endswith("\N{REPLACEMENT CHARACTER}"):
            yield after[len(before) :]
            start, done = done, len(ids)
    if done < len(ids):
        yield decoded(start, len(ids))[len(decoded(start, done)) :]


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str, model: "SkiplessForCausalLM"):
    import torch

    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                "the prompt is empty, and this tokenizer has no token for the start of a text; give --prompt"
            )
        ids = [tokenizer.bos_token_id]
    return torch.tensor([ids], device=model.device)


def _stop(model: "SkiplessForCausalLM") -> list[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ValueError('no prompt: give --prompt "…", or pipe text in')
    return sys.stdin.read()


def _write(pieces: Iterable[str], start: str) -> None:
    """Write and flush piece by piece. Ctrl-C ends the line; a reader that has gone (`| head`) ends it silently."""
    try:
        print(start, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
