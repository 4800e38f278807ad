"""One way to open a trained model: a run, its checkpoint or an export, with its tokenizer."""

import hashlib
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skipless.data.store import MANIFEST, folder_tokenizer, read_manifest
from skipless.data.tokenizer import MODEL_FILE, ByteTokenizer, Tokenizer, load_tokenizer
from skipless.model.transformer import Transformer
from skipless.training.checkpoint import load_checkpoint, load_model
from skipless.training.config import Experiment
from skipless.training.run import CHECKPOINTS, EXPERIMENT, EXPORT, FINISHED, read_experiment

if TYPE_CHECKING:
    from skipless.hf.modeling import SkiplessForCausalLM


def read_pretrained(folder: str | Path) -> "SkiplessForCausalLM":
    """What save_pretrained wrote, from the disk alone, on the CPU and in evaluation mode."""
    from safetensors import SafetensorError

    from skipless.hf.modeling import SkiplessForCausalLM

    try:
        return SkiplessForCausalLM.from_pretrained(str(folder), local_files_only=True).eval()
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} (*.safetensors) are damaged or cut short ({error}): write them again, for a run "
            "with `skipless export RUN`"
        ) from error


def as_pretrained(model: "Transformer", tokenizer: Tokenizer) -> "tuple[SkiplessForCausalLM, Any]":
    """A model of ours, whose parameters are shared, and its tokenizer as transformers knows them.

    Text ends at the tokenizer's end-of-document token, also at that of bytes, which is no special one in transformers.
    """
    from skipless.hf.modeling import SkiplessForCausalLM

    fast = fast_tokenizer(tokenizer)
    wrapper = SkiplessForCausalLM.from_native(model, fast)
    wrapper.config.eos_token_id = tokenizer.end
    assert wrapper.generation_config is not None
    wrapper.generation_config.eos_token_id = tokenizer.end
    return wrapper, fast


def fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """The fast tokenizer with the same ids."""
    from skipless.hf.tokenizer import byte_tokenizer, sentencepiece_tokenizer

    inner = getattr(tokenizer, "inner", None)
    if inner is not None:
        return inner
    if tokenizer.model is None:
        return byte_tokenizer()
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(tokenizer.model)
        file.flush()
        return sentencepiece_tokenizer(file.name)


WEIGHTS = "model.safetensors"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """origin says which weights these are; validation is the prepared folder that a run validates on.

    length and packed are how a run trained and validated; a saved model knows its length only.
    """

    model: Transformer
    tokenizer: Tokenizer
    origin: str
    length: int
    packed: bool = False
    validation: Path | None = None


class FastTokenizer:
    """A tokenizer of transformers as a skipless Tokenizer. Its end-of-document token is its </s>.

    The byte tokenizer has none; its end is 0xFF, as in ByteTokenizer.
    """

    kind = "transformers"
    model: bytes | None = None

    def __init__(self, inner: Any):
        self.inner = inner
        self.vocab_size = len(inner)
        self._byte_level = "ByteLevel" in type(inner.backend_tokenizer.decoder).__name__
        end = inner.eos_token_id
        if end is None and self._byte_level and self.vocab_size == 256:
            end = 0xFF
        if end is None:
            raise ValueError("the tokenizer has no end-of-text token: set eos_token and save it again")
        self.end = int(end)
        self.sha256 = hashlib.sha256(inner.backend_tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Token ids (int32), no special ones added."""
        return np.array(self.inner.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; end-of-document tokens stand for none."""
        return str(self.inner.decode([int(token) for token in tokens if int(token) != self.end]))

    def encode_documents(self, texts: Iterable[str]) -> np.ndarray:
        """All documents, each followed by `end`."""
        return np.concatenate([np.append(self.encode(text), self.end) for text in texts])

    def token_bytes(self) -> np.ndarray:
        """Bytes of text per token, see skipless.training.evaluate.token_bytes."""
        special = {*self.inner.all_special_ids, self.end}

        def size(token: int) -> int:
            piece = self.inner.convert_ids_to_tokens(token)
            if token in special:
                return 0
            if self._byte_level:
                return len(piece)
            return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())

        return np.array([size(token) for token in range(self.vocab_size)], dtype=np.int64)


def load_trained(path: str | Path, tokenizer: str | Path | None = None) -> LoadedModel:
    """The model on the CPU and its tokenizer. A run's tokenizer is the one kept in it, or in its prepared data.

    tokenizer names another one: a SentencePiece .model file, "bytes", or a prepared folder.
    """
    path = Path(path)
    given = None if tokenizer is None else find_tokenizer(tokenizer)
    if (path / EXPERIMENT).is_file():
        return _run(path, given)
    if (path / "config.json").is_file():
        return _saved(path, given)
    raise ValueError(
        f"{path} is neither a run (no {EXPERIMENT}) nor a saved model (no config.json): give a folder that "
        "`skipless train` or save_pretrained wrote"
    )


def find_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a prepared folder, a run, a folder that save_pretrained wrote, or a .model file; or "bytes"."""
    folder = Path(name)
    if (folder / MANIFEST).is_file():
        return folder_tokenizer(folder, read_manifest(folder).tokenizer)
    if (folder / MODEL_FILE).is_file():
        return load_tokenizer(folder / MODEL_FILE)
    if (folder / "tokenizer.json").is_file():
        return _fast(folder)
    return load_tokenizer(name)


def _run(path: Path, tokenizer: Tokenizer | None) -> LoadedModel:
    experiment = read_experiment(path)
    named = experiment.data.folder
    data = Path(named) if named is not None and (Path(named) / MANIFEST).is_file() else None
    tokenizer = tokenizer or _run_tokenizer(path, data, experiment)
    valid = Path(experiment.data.valid or named or "")
    model, origin = _run_model(path, experiment)
    how = (experiment.train.length, experiment.data.packed)
    return LoadedModel(model, tokenizer, origin, *how, valid if (valid / MANIFEST).is_file() else None)


def _run_tokenizer(path: Path, data: Path | None, experiment: Experiment) -> Tokenizer:
    places = [place for place in (path, data, path / EXPORT) if place is not None and _has_tokenizer(place)]
    if places:
        return find_tokenizer(places[0])
    if (path / FINISHED).is_file() and experiment.model.vocab_size in (256, 257):
        return ByteTokenizer()  # any other kind of tokenizer lies in the folder of a finished run
    raise ValueError(
        f"the tokenizer of {path} is not found: its data folder is {experiment.data.folder!r} (working folder "
        f"{Path.cwd()}); name the prepared folder or the .model file with --tokenizer, or write --tokenizer bytes"
    )


def _run_model(path: Path, experiment: Experiment) -> tuple[Transformer, str]:
    """The weights of a finished run, or those of the newest checkpoint. Never an export, which may be older."""
    if (path / WEIGHTS).is_file():
        return load_model(path / WEIGHTS), str(path / WEIGHTS)
    model = Transformer(experiment.model)
    found = load_checkpoint(path / CHECKPOINTS, model)
    if found is None:
        other = f", or name its export, {path / EXPORT}" if (path / EXPORT / "config.json").is_file() else ""
        raise ValueError(f"{path} holds no weights, neither {WEIGHTS} nor a checkpoint: train it first{other}")
    return model.eval(), f"{path / CHECKPOINTS}, step {found[0]}"


def _saved(path: Path, tokenizer: Tokenizer | None) -> LoadedModel:
    if tokenizer is None and not _has_tokenizer(path):
        raise ValueError(
            f"{path} holds no tokenizer.json or {MODEL_FILE}: save the tokenizer beside the model, or give --tokenizer"
        )
    model = read_pretrained(path).model
    return LoadedModel(model, tokenizer or find_tokenizer(path), str(path), model.config.length)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, MODEL_FILE, "tokenizer.json"))


def _fast(folder: Path) -> FastTokenizer:
    from transformers import AutoTokenizer

    return FastTokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
