"""The weights alone, as one safetensors file that carries its ModelConfig: what is exported, shared and loaded."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from skipless.data.shards import write_whole
from skipless.model.config import ModelConfig
from skipless.model.folded import FoldedTransformer
from skipless.model.transformer import Transformer
from skipless.train.collective import on_main
from skipless.train.disk import storing
from skipless.train.state import compare, model_tensors

CONFIG, SHA256 = "model_config", "tensors_sha256"


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the whole, unsharded weights of a Transformer, as it is or inside DDP or FSDP2. All processes must call it.

    The file is there with all of its bytes or not at all.
    """
    tensors = model_tensors(model, StateDictOptions(full_state_dict=True, cpu_offload=True))
    inner = next((module for module in model.modules() if isinstance(module, Transformer)), None)
    if inner is None:
        raise ValueError(f"save_weights writes a Transformer with its settings; this is a {type(model).__name__}")
    if isinstance(inner, FoldedTransformer):
        raise ValueError("this network is folded, and no longer the one of its settings: use its own save(path)")
    config = inner.config

    def write() -> None:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"format": "pt", CONFIG: config.to_json(), SHA256: _digest(whole)}
        with storing(path, "export again"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _ordered(save(whole, metadata)))

    on_main(write)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model, sharded or not, from save_weights' file. ValueError names every tensor that does not fit."""
    _, tensors = _read(path)
    wanted = {name: str(tuple(tensor.shape)) for name, tensor in model_tensors(model).items()}
    compare(wanted, {name: str(tuple(tensor.shape)) for name, tensor in tensors.items()}, path)
    set_model_state_dict(model, cast(dict[str, Any], tensors), options=StateDictOptions(full_state_dict=True))


def load_model(path: Path, *, impl: str = "auto") -> Transformer:
    """The Transformer of save_weights' file, from that file alone, on the CPU and in evaluation mode."""
    metadata, tensors = _read(path)
    if CONFIG not in metadata:
        raise ValueError(f"{path} does not say which model it is of (no {CONFIG!r} in its metadata): use load_weights")
    with torch.device("meta"):  # initial weights would be computed only to be replaced
        model = Transformer(ModelConfig.from_json(metadata[CONFIG]), impl=impl)
    wanted = {name: str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    compare(wanted, {name: str(tuple(tensor.shape)) for name, tensor in tensors.items()}, path)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; weights are in a run's export folder")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, cut short or no safetensors file ({error}): export it again") from error
    if SHA256 in metadata and metadata[SHA256] != _digest(tensors):
        raise ValueError(f"{path} is damaged (its tensors are not those that were written): export it again")
    return metadata, tensors


def _ordered(file: bytes) -> bytes:
    """The file with its metadata in order, which safetensors shuffles: equal weights then make equal files."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(file)[end:]))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        sha256.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()
