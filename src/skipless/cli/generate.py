"""`skipless generate`: text from a run or a saved model, as it comes."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipless.console import check_seed
from skipless.training.load import check_model, load_model

if TYPE_CHECKING:
    from skipless.data.tokenizer import Tokenizer

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
    check_model(folder)  # before torch is imported
    check_seed(seed)
    import torch

    from skipless.model.generate import Sampling, stream

    sampling = Sampling(temperature, top_k, top_p)
    text = prompt if prompt is not None else _standard_input()
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no UTF-8 text: its character {error.start} stands for a byte alone") from error
    loaded = load_model(folder, tokenizer, device)
    ids = _encode(loaded.tokenizer, text)
    tokens = torch.tensor([ids], device=loaded.model.embedding.weight.device)
    new = stream(loaded.model, tokens, max_new_tokens, sampling=sampling, seed=seed, stop=loaded.stop)
    pieces = text_of(loaded.tokenizer, ids, (int(token[0]) for token in new if int(token[0]) not in loaded.stop))
    _write(pieces, text if echo else "")


def text_of(tokenizer: "Tokenizer", prompt: list[int], new: Iterable[int]) -> Iterator[str]:
    """The text each new token adds. Tokens that end inside a character wait for the next ones."""

    def decoded(first: int, last: int) -> str:
        return tokenizer.decode(ids[first:last])

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


def _encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    ids, start = tokenizer.encode(text).tolist(), getattr(tokenizer, "start", None)
    if ids:
        return ids
    if start is not None:
        return [start]
    raise ValueError("the prompt is empty, and this tokenizer has no token for the start of a text; give --prompt")


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ValueError('no prompt: give --prompt "…", or pipe text in')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"standard input is no UTF-8 text: byte {error.start} is 0x{byte:02x}") from error


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
