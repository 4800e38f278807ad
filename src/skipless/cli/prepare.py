"""`skipless prepare`: from a corpus to token shards, or from pictures to arrays."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from skipless.cli.app import first_given
from skipless.console import Progress
from skipless.data.formats import Reading
from skipless.data.prepare import Preparation, default_folder, prepare
from skipless.data.tokenizer import Bytes, FileTokenizer, TokenizerChoice, TrainUnigram

STDLIB = "stdlib"


def command(
    context: typer.Context,
    corpus: Annotated[
        str, typer.Argument(help="stdlib, wikitext-103, c4, or a file, folder or quoted glob; with --images a folder.")
    ] = STDLIB,
    out: Annotated[Path | None, typer.Option(help="Folder for the shards; by default data/CORPUS-VOCAB.")] = None,
    vocab: Annotated[int, typer.Option(help="Pieces of the SentencePiece tokenizer to train.")] = 32_000,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this SentencePiece .model; train none.")] = None,
    bytes_: Annotated[bool, typer.Option("--bytes", help="Use the 256 byte values as tokens.")] = False,
    valid: Annotated[str | None, typer.Option(help="Validation text: a corpus of its own.")] = None,
    valid_fraction: Annotated[float | None, typer.Option(help="Share of documents to hold out, by their hash.")] = None,
    workers: Annotated[int | None, typer.Option(help="Threads that tokenise; by default all cores.")] = None,
    sample_mb: Annotated[float, typer.Option(help="Text to train the tokenizer on, in MB.")] = 64.0,
    shard_mb: Annotated[float, typer.Option(help="Text per shard, in million characters.")] = 64.0,
    text_field: Annotated[str, typer.Option(help="Field of .jsonl and .parquet that holds the text.")] = "text",
    invalid_utf8: Annotated[str, typer.Option(help="At bytes that are not UTF-8: error, or replace.")] = "error",
    download: Annotated[bool, typer.Option("--download", help="Allow the network, for wikitext-103 and c4.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over in a folder with other options.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Pictures: train/CLASS/*.jpg, test/CLASS/*.jpg.")] = False,
) -> None:
    """Turn text into token shards: train a tokenizer, tokenise with all cores, write a manifest.

    With --images, turn pictures into arrays: a folder, or a tar, of train/CLASS/*.jpg and test/CLASS/*.jpg. Of the
    other options only --out and --force are theirs.

    Can be stopped at any time and run again; a finished folder is checked and left as it is.
    """
    if images:
        if given := first_given(context, but=("corpus", "out", "force", "images")):
            raise ValueError(f"{given} is for text, and --images for pictures: give one of them")
        if corpus == STDLIB and not Path(corpus).exists():
            raise ValueError(
                "--images needs pictures: name a folder or a tar with train/CLASS/*.jpg and test/CLASS/*.jpg"
            )
        _prepare_images(corpus, out, force)
        return
    if (bytes_ or tokenizer) and (given := first_given(context, among=("vocab", "sample_mb"))):
        one = "--bytes" if bytes_ else f"--tokenizer {tokenizer}"
        raise ValueError(f"{given} is for a tokenizer that is trained, and {one} trains none: give one of them")
    reading = Reading(text_field, cast(Literal["error", "replace"], invalid_utf8))
    choice, label = _choice(bytes_, tokenizer, vocab, sample_mb)
    plan = Preparation(corpus, choice, valid, valid_fraction, shard_mb, reading, download)
    folder = out or default_folder(corpus, label)
    try:
        prepare(plan, folder, workers, force, Progress())
    except KeyboardInterrupt:
        words = f"stopped; finished shards in {folder} are kept: run the same command to resume"
        raise KeyboardInterrupt(words) from None
    print(folder)


def _prepare_images(source: str, out: Path | None, force: bool) -> None:
    from skipless.data.image_files import prepare_images

    folder = out or default_folder(source, "images")
    try:
        prepare_images(source, folder, force, Progress())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; the same command prepares {folder} from the beginning") from None
    print(folder)


def _choice(as_bytes: bool, file: Path | None, vocab: int, sample_mb: float) -> tuple[TokenizerChoice, str]:
    if as_bytes and file:
        raise ValueError("--bytes and --tokenizer exclude each other: give one")
    if as_bytes:
        return Bytes(), "bytes"
    if file == Path("bytes") and not file.exists():  # as generate, eval and export have it
        raise ValueError(
            "--tokenizer is a SentencePiece .model, and no file bytes is here: for byte values use --bytes"
        )
    if file:
        return FileTokenizer(file), file.stem
    return TrainUnigram(vocab, sample_mb), str(vocab)
