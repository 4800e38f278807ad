"""`skipless export RUN`: a trained run as a Hugging Face folder that AutoModelForCausalLM loads."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder; its newest weights are taken.")],
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/export.")] = None,
) -> None:
    """Write config, weights (safetensors) and tokenizer of a run for Hugging Face tools."""
    from skipless.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
    from skipless.hf import SkiplessForCausalLM, byte_tokenizer, export_tokenizer
    from skipless.train.subject import load_subject

    subject = load_subject(run)
    folder = out or run / "export"
    SkiplessForCausalLM.from_native(subject.model).save_pretrained(folder)
    if isinstance(subject.tokenizer, ByteTokenizer):
        byte_tokenizer().save_pretrained(folder)
    elif isinstance(subject.tokenizer, SentencePieceTokenizer) and subject.tokenizer.model is not None:
        model_file = folder / "tokenizer.model"
        model_file.write_bytes(subject.tokenizer.model)
        export_tokenizer(model_file, folder)
    print(f"{folder}: load it with AutoModelForCausalLM.from_pretrained after `import skipless.hf`")
