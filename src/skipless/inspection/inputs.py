"""What an inspection is given: batches and labels, checked, and as arguments of the model."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.inspection.stacks import hidden
from skipless.model.transformer import Transformer

Batch = Tensor | Mapping[str, Any] | tuple
_IMAGES, _TOKENS = "pixel_values", "input_ids"
DECODER_IDS = "decoder_input_ids"
IGNORED = -100


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel or torch.compile, whose own hooks must not run."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; it must be a torch.nn.Module, or a folder that save_pretrained wrote")
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            return unwrapped(inner)
    return model


def own_network(model: nn.Module) -> Transformer | None:
    """The Transformer of this library that a model is, or that its Hugging Face wrapper holds."""
    return next((each for each in (model, getattr(model, "model", None)) if isinstance(each, Transformer)), None)


def check_batch(model: nn.Module, batch: Batch, labels: Tensor | None) -> None:
    """Raise for what cannot be inspected: no tensor, another device, one token, ids outside the vocabulary."""
    _check_values(model)
    tensors = {name: value for name, value in parts_of(batch).items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"batch is {type(batch).__name__} without a tensor; give token ids (rows, T), or a mapping")
    if labels is not None:
        tensors["labels"] = labels
    place = next((p.device for p in model.parameters()), None)
    for name, tensor in tensors.items():
        if place is not None and tensor.device != place and not _spread(model):
            word = name if isinstance(name, str) else "batch" if isinstance(batch, Tensor) else f"batch[{name}]"
            raise ValueError(f"{word} is on {tensor.device} and the model on {place}; move one: {word}.to('{place}')")
    ids = tensors.get(_TOKENS)
    of_images = isinstance(model, Transformer) and model.config.images is not None
    if ids is None and isinstance(batch, Tensor) and not batch.is_floating_point() and not of_images:
        ids = batch
    if ids is not None:
        _check_ids(model, ids)


def _check_values(model: nn.Module) -> None:
    """Refuse parameters without values, and those that no gradient can be taken of. Offloaded ones are fetched."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and not any(hasattr(module, "_hf_hook") for module in model.modules()):
            raise ValueError(
                f"{name} is on the meta device and has no values: build the model on a real device, or "
                "model.to_empty(device='cpu') and load its weights"
            )
        if tensor.is_inference():
            raise ValueError(
                f"{name} was made under torch.inference_mode(), so that nothing can be differentiated by it; build "
                "the model outside of it"
            )


def _check_ids(model: nn.Module, ids: Tensor) -> None:
    if ids.dim() != 2:
        images = "; images are given as floats" * (ids.dim() == 4)
        raise ValueError(
            f"token ids are {tuple(ids.shape)}; they must be (rows, T): ids[None] makes a batch of one row{images}"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token ids are {ids.dtype}; an embedding reads torch.int64 or torch.int32: ids.long()")
    if ids.shape[1] < 2:
        raise ValueError(
            f"the batch has {ids.shape[1]} token{'s' * (ids.shape[1] == 0)} per row; cosines compare locations, so "
            "give at least 2 tokens"
        )
    if ids.numel() == 0:
        raise ValueError(f"the batch is empty: {tuple(ids.shape)}")
    vocabulary = _vocabulary(model)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        limit = "" if vocabulary is None else f" and below the model's {vocabulary}"
        raise ValueError(f"token ids run from {low} to {high}; they must be at least 0{limit}")


def _vocabulary(model: nn.Module) -> int | None:
    """Rows of the input embedding, where the model says which that is."""
    if isinstance(model, Transformer):
        return model.config.vocab_size
    find = getattr(model, "get_input_embeddings", None)
    try:
        table = find() if callable(find) else None
    except NotImplementedError:
        return None
    rows = getattr(table, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def _spread(model: nn.Module) -> bool:
    """Whether the model lies on several devices and moves its inputs itself."""
    return len({p.device for p in model.parameters()}) > 1


def padding(batch: Batch) -> Tensor | None:
    """True at real tokens, (rows, T), or None where nothing is padded."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return None
    return mask != 0


def rows_and_length(batch: Batch) -> tuple[int, int] | None:
    """(rows, T) of the mask or the token ids, or None where the batch has neither."""
    parts = parts_of(batch)
    integers = [value for value in parts.values() if isinstance(value, Tensor) and not value.is_floating_point()]
    for value in (parts.get("attention_mask"), parts.get(_TOKENS), *integers):
        if isinstance(value, Tensor) and value.dim() == 2:
            return value.shape[0], value.shape[1]
    return None


def model_inputs(model: nn.Module, batch: Batch) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the model's forward: labels are left to us, and no cache is filled."""
    accepted = signature(model.forward).parameters
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = {str(name): value for name, value in batch.items() if name != "labels"}
    elif isinstance(batch, Tensor) and batch.is_floating_point() and _IMAGES in accepted:
        kwargs[_IMAGES] = batch
    elif isinstance(batch, Tensor) and _TOKENS in accepted:
        kwargs[_TOKENS] = batch
    else:
        args = batch if isinstance(batch, tuple) else (batch,)
    if "use_cache" in accepted:
        kwargs.setdefault("use_cache", False)
    return args, kwargs


def answer(model: nn.Module, batch: Batch) -> Any:
    """What the model gives for a batch."""
    args, kwargs = model_inputs(model, batch)
    try:
        return model(*args, **kwargs)
    except IndexError as error:
        tables = {name: len(m.weight) for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        shape = rows_and_length(batch)
        if not tables or shape is None:
            raise
        rows = ", ".join(f"{name} {count}" for name, count in tables.items())
        raise ValueError(
            f"the model looks up what is not there ({error}): a row of the batch has {shape[1]} locations, and the "
            f"model's tables have so many rows: {rows}; give ids and a length that are in them"
        ) from error


def with_decoder_ids(model: nn.Module, batch: Batch, labels: Tensor | None) -> Batch:
    """What an encoder-decoder reads beside its ids, where it was not given: its labels shifted by one, or the ids."""
    config = getattr(model, "config", None)
    ids = batch.get(_TOKENS) if isinstance(batch, Mapping) else batch
    needed = getattr(config, "is_encoder_decoder", False) and DECODER_IDS in signature(model.forward).parameters
    given = isinstance(batch, Mapping) and (DECODER_IDS in batch or "decoder_inputs_embeds" in batch)
    if not needed or given or not isinstance(ids, Tensor) or ids.is_floating_point():
        return batch
    decoder = ids if labels is None else _one_behind(model, labels)
    return {**(batch if isinstance(batch, Mapping) else {_TOKENS: ids}), DECODER_IDS: decoder}


def _one_behind(model: nn.Module, labels: Tensor) -> Tensor:
    """What a decoder reads where it is to give these labels: a start, and each label behind it."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    try:
        if callable(shift):
            return shift(labels=labels)
    except (AttributeError, TypeError, ValueError):  # a config that names no start
        pass
    config = getattr(model, "config", None)
    named = [getattr(config, f"{word}_token_id", None) for word in ("decoder_start", "bos", "pad")]
    start, padding = (next((each for each in found if isinstance(each, int)), 0) for found in (named, named[2:]))
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, padding)


def read_by(batch: Batch, name: str) -> Batch:
    """The part of the batch that a stack of that name reads: a decoder's ids and mask, where it has its own."""
    own = id_keys(batch)[1]
    if own is None or "decoder" not in name:
        return batch
    mask = batch.get("decoder_attention_mask") if isinstance(batch, Mapping) else None
    return {_TOKENS: parts_of(batch)[own], "attention_mask": mask}


def parts_of(batch: Batch) -> dict[str | int, Any]:
    """What a batch holds, by name or number."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, Tensor | tuple):
        return dict(enumerate(batch)) if isinstance(batch, tuple) else {0: batch}
    raise ValueError(f"batch is a {type(batch).__name__}; give a tensor, a mapping of tensors, or a tuple of arguments")


def id_keys(batch: Batch) -> tuple[str | int | None, str | int | None]:
    """Under which name or number a batch holds token ids, (rows, T), and those that a decoder reads, if it has its own.

    What transformers calls so, or else integers that are no mask, going by their names and numbers.
    """
    parts = parts_of(batch)
    first, second = (key if _is_ids(parts.get(key)) else None for key in (_TOKENS, DECODER_IDS))
    if first is None:
        others = [key for key, value in parts.items() if key != DECODER_IDS and _may_be_ids(str(key), value)]
        larger = [key for key in others if bool((parts[key] > 1).any())]  # a mask has no number above 1
        first, *more = [*(larger or others), None]
        second = next(iter(more), None) if second is None else second
    return first, second


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _may_be_ids(key: str, value: Any) -> bool:
    return _is_ids(value) and not any(word in key for word in ("mask", "label", "type", "position"))


def _mapped(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """The batch with every value changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    return tuple(map(change, batch)) if isinstance(batch, tuple) else {str(k): change(v) for k, v in batch.items()}


def some_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch of some of its rows: of every tensor that has as many as the ids or the mask."""
    shape = rows_and_length(batch)
    chosen = list(rows)

    def cut(value: Any) -> Any:
        whole = shape is not None and isinstance(value, Tensor) and value.dim() > 0 and len(value) == shape[0]
        return value[chosen] if whole else value

    return _mapped(batch, cut)


def given_labels(batch: Batch, labels: Tensor | None) -> Tensor | None:
    """The labels, whichever way they came: as an argument, or in the mapping as for a training step."""
    inside = batch.get("labels") if isinstance(batch, Mapping) else None
    if inside is not None and labels is not None:
        raise ValueError("labels are in the batch and given beside it; leave one out")
    return inside if labels is None else labels


def labelled_loss(model: nn.Module, output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the model's logits, shifted by one location for causal language models."""
    logits = logits_of(output)
    if not logits.requires_grad:
        raise ValueError(
            "what the model gives is detached from its parameters, so that labels give no gradient: look for detach() "
            "or torch.no_grad() on the way to it, or leave the labels out to have the blocks inspected by themselves"
        )
    check_labels(labels, logits.shape[-1])
    if predicts_next(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels are {tuple(labels.shape)} and logits {tuple(logits.shape)}; labels need one class per location "
            "of the logits (or per row, where the model pools), else give loss=lambda output: …"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().long(), ignore_index=IGNORED)


def readable(output: Any) -> Tensor | None:
    """The logits among what a model returns, where they are numbers by row and class."""
    try:
        logits = logits_of(output)
    except ValueError:
        return None
    plain = logits.layout == torch.strided and not logits.is_nested and logits.is_floating_point()
    return logits if plain and logits.dim() > 1 else None


def check_loss(loss: Any) -> Tensor:
    """A loss that can be differentiated."""
    what = type(loss).__name__
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return loss
        what = f"a tensor of {tuple(loss.shape)}" if loss.numel() != 1 else "detached from the model"
    raise ValueError(f"loss(output) is {what}; it must be one number that depends on the output: a tensor's .mean()")


def without_inference(batch: Batch) -> Batch:
    """The batch with copies of what was made under torch.inference_mode(), which autograd refuses."""
    with torch.inference_mode(False):
        return _mapped(batch, lambda each: each.clone() if isinstance(each, Tensor) and each.is_inference() else each)


def logits_of(output: Any) -> Tensor:
    """The logits among what a model returns."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else hidden(output)


def predicts_next(model: nn.Module) -> bool:
    """Whether the output at a location is for the token after it."""
    if isinstance(model, Transformer):
        return model.config.head == "lm"
    if getattr(getattr(model, "config", None), "causal", None) is False:  # XLM's head serves both kinds
        return False
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def check_labels(labels: Tensor, classes: int) -> None:
    """Integers in 0 … classes−1, or −100; torch itself reads past the end, dies without a word, or ignores what wrapped
    around to −100."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels are {labels.dtype}; class labels are integers, as in torch.long: for a loss of another kind give "
            "loss=lambda output: …"
        )
    largest = torch.iinfo(labels.dtype).max
    if largest < classes - 1:
        raise ValueError(
            f"labels are {labels.dtype}, which holds at most {largest}, but the model has {classes} classes: larger "
            "ones wrap around; make them torch.long before labels are stored in them"
        )
    real = labels[labels != IGNORED]
    if real.numel() == 0:
        raise ValueError(f"every label is {IGNORED}, which is ignored, so there is no loss to differentiate")
    low, high = int(real.min()), int(real.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels hold {low if low < 0 else high}, but the model has {classes} classes: they must lie in "
            f"0 … {classes - 1}, or be {IGNORED} to be ignored"
        )


def unit_gradient(like: Tensor) -> Tensor:
    """An independent random unit vector at every location, the same for every call; torch's own generator rests."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(like.shape, generator=generator)
    return (noise / noise.norm(dim=-1, keepdim=True)).to(like)
