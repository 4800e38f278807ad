"""A model and its optimiser as named tensors and plain JSON, by torch.distributed.checkpoint, without a pickle.

The tensors go into DCP's safetensors files, one per process; everything else (rates, betas, the structure of the
optimiser's state) is JSON. DCP's default storage would keep both as pickles.
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


def model_tensors(model: nn.Module, options: StateDictOptions | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by the names they have without wrappers such as DDP's and torch.compile's."""
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))


def capture(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Tensor], Any]:
    """All tensors by name, and the rest of the optimiser's state as JSON that says where each tensor belongs.

    Nothing is copied. An optimiser that has not stepped is saved as such: DCP would first step it at rate 0, which
    counts as a step.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    if optimizer is None:
        return tensors, None
    if optimizer.state:
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    else:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        state = {"state": {}, "param_groups": groups}
    return tensors, _take_out(state, "optimizer", tensors)


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save into `folder`, each process its own part. OSError if a file could not be written."""
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with _dcp():
        dcp.save({name: tensor.contiguous() for name, tensor in tensors.items()}, storage_writer=writer)


def restore(folder: Path, model: nn.Module, optimizer: Optimizer | None, rest: Any) -> None:
    """Load what `write` saved, whatever number of processes it was, into modules sharded or not.

    ValueError, before anything is changed, if the checkpoint is of another model.
    """
    saved: dict[str, Any] = dict(HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata)
    described = {name: _describe(entry.properties.dtype, entry.size) for name, entry in saved.items()}
    weights = model_tensors(model)
    wanted = {f"model.{name}": _describe(tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    compare(wanted, {name: text for name, text in described.items() if name.startswith("model.")}, folder)
    if optimizer is not None and rest is None:
        raise ValueError(f"{folder} holds no optimiser's state: it was saved without one; load it without one")
    tensors: dict[str, Tensor] = {}
    state = _optimizer_targets(model, optimizer, rest, saved, tensors) if optimizer is not None else None
    tensors |= {f"model.{name}": tensor for name, tensor in weights.items()}
    with _dcp():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))
    set_model_state_dict(model, cast(dict[str, Any], weights))
    if optimizer is not None and state is not None:
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state)


def compare(wanted: Mapping[str, str], found: Mapping[str, str], source: Path) -> None:
    """Refuse tensors that are not the model's, naming them. Values are shapes, or whatever else must agree."""
    changed = [
        f"{name} is {found[name]} there, {wanted[name]} here"
        for name in wanted
        if found.get(name, wanted[name]) != wanted[name]
    ]
    complaints = {
        "missing there": [name for name in wanted if name not in found],
        "unknown here": [name for name in found if name not in wanted],
        "different": changed,
    }
    parts = [f"{kind}: {_first(names)}" for kind, names in complaints.items() if names]
    if parts:
        raise ValueError(
            f"{source} is of another model; {'; '.join(parts)}. Build the model from the run's own settings"
        )


def _first(names: list[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _optimizer_targets(
    model: nn.Module, optimizer: Optimizer, rest: Any, saved: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The optimiser's state in the saved structure, its tensors, yet to be filled, also by name in `tensors`."""
    live: Any = get_optimizer_state_dict(model, optimizer)  # steps a new optimiser at rate 0, to learn how it shards
    empty = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in saved.items()
        if name.startswith("optimizer.")
    }
    state = _put_back(rest, live, empty, tensors)
    for group, own in zip(state["param_groups"], live["param_groups"], strict=True):
        group.setdefault("params", own["params"])
        for name in group["params"]:  # a parameter that has not been updated has no state
            state["state"].setdefault(name, {})
    return state


def _take_out(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON; tensors move to `tensors` under the path that stands for them."""
    if isinstance(node, Tensor):
        tensors[name] = node
        return {"tensor": name}
    if isinstance(node, dict):
        return {"dict": {key: _take_out(value, f"{name}.{key}", tensors) for key, value in node.items()}}
    if isinstance(node, list | tuple):
        values = [_take_out(value, f"{name}.{index}", tensors) for index, value in enumerate(node)]
        return {"tuple" if isinstance(node, tuple) else "list": values}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise ValueError(
        f"{name} is a {type(node).__name__}, which a checkpoint does not hold; keep it as a tensor or number"
    )


def _put_back(node: Any, live: Any, empty: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> Any:
    """The inverse of _take_out, with tensors yet to be filled: the live ones, where they fit, else empty ones."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        fits = isinstance(live, Tensor) and (live.shape, live.dtype) == (empty[value].shape, empty[value].dtype)
        tensors[value] = live if fits else torch.empty_like(empty[value], device="cpu")
        return tensors[value]
    if kind == "dict":
        below = live if isinstance(live, dict) else {}
        return {key: _put_back(child, below.get(key), empty, tensors) for key, child in value.items()}
    below = list(live) if isinstance(live, list | tuple) else []
    below += [None] * (len(value) - len(below))
    children = [_put_back(child, part, empty, tensors) for child, part in zip(value, below, strict=False)]
    return tuple(children) if kind == "tuple" else children


@contextmanager
def _dcp() -> Generator[None]:
    """DCP without its word about running in one process, and with the error itself instead of its collection."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:  # not an Exception, and its text is a page long
        cause = next(iter(error.failures.values()))[0]
        raise cause from None
