"""`skipless export RUN`: a trained run as a Hugging Face folder that AutoModelForCausalLM loads."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder; its newest weights are taken.")],
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/export.")] = None,
) -> None:
    """Write config, weights (safetensors) and tokenizer of a run for Hugging Face tools."""
    from skipless.data.tokenizer import MODEL_FILE
    from skipless.train.pretrained import as_pretrained
    from skipless.train.subject import load_subject

    subject = load_subject(run)
    folder = out or run / "export"
    for part in as_pretrained(subject.model, subject.tokenizer):
        part.save_pretrained(folder)
    if subject.tokenizer.model is not None:
        (folder / MODEL_FILE).write_bytes(subject.tokenizer.model)
    print(f"{folder}: load it with AutoModelForCausalLM.from_pretrained after `import skipless.hf`")
