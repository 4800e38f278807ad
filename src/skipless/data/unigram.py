"""Train a SentencePiece model in a process of its own: `python -m skipless.data.unigram VOCAB`.

Lines come in by standard input, the model goes out by standard output. A process, because the trainer cannot be
interrupted and keeps its memory.
"""

import contextlib
import io
import os
import sys
import threading
import time
from importlib import import_module

THREADS = 16  # fixed: the trained model depends on the number of threads, and must not depend on the machine
FAILED = 3


def train(lines, vocab_size: int) -> bytes:
    """A unigram model with byte fallback that gives back any text exactly: no normalisation, no ▁ of its own."""
    model = io.BytesIO()
    import_module("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        num_threads=THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main() -> int:
    """Read lines, train, write the model; the trainer's complaint goes to standard error with exit code 3."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        model = train((line[:-1] for line in sys.stdin.buffer), int(sys.argv[1]))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return FAILED
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
