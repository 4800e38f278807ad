"""What a ModelConfig may hold. Every refusal has the value seen, the rule, and a value that works."""

import difflib
import math
import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from skipless.theory.activations import odd_factor

if TYPE_CHECKING:
    from skipless.model.config import ModelConfig

_LEAST = {"vocab_size": 1, "width": 1, "depth": 1, "heads": 1, "kv_heads": 1, "hidden": 0, "length": 1, "classes": 0}
_CHOICES = {
    "norm": ("none", "pre", "post"),
    "position": ("rope", "relative", "none"),
    "query_key": ("zero-query", "zero-key", "small", "normal"),
    "init": ("orthogonal", "gaussian"),
    "head": ("lm", "token", "pooled"),
    "bias_gain": (True, False),
    "mlp_bias": (True, False),
    "causal": (True, False),
    "mlp_init": (None, "mirrored"),
    "value_output": ("trained", "identity"),
}


def check_names(kind: Any, data: Mapping[str, Any]) -> None:
    """Refuse names that are no fields of the dataclass, with the nearest one that is."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a {kind.__name__} is read from a mapping of its fields, not from {type(data).__name__}")
    known = {f.name for f in fields(kind)}
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(sorted(known))}"
            raise ValueError(f"{kind.__name__} has no field {name!r}; {hint}")


def whole_numbers(config: "ModelConfig") -> dict[str, int]:
    """All sizes that were given, as Python's integers: numpy's are no JSON, and 36.0 blocks cannot be counted."""
    given = {name: getattr(config, name) for name in _LEAST}
    derived = ("kv_heads", "hidden")
    return {name: _whole(name, value) for name, value in given.items() if not (value is None and name in derived)}


def _whole(name: str, value: Any) -> int:
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or number < _LEAST[name]:
        meaning = ", which means no MLPs" if name == "hidden" else ""
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {_LEAST[name]}{meaning}")
    return number


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def check_sizes(config: "ModelConfig") -> None:
    """Refuse sizes that do not go together."""
    if config.width % config.heads:
        near = round(config.width / config.heads) * config.heads
        raise ValueError(f"width={config.width} is not a multiple of heads={config.heads}; the nearest is {near}")
    if config.heads % (config.kv_heads or config.heads):
        raise ValueError(f"kv_heads={config.kv_heads} does not divide heads={config.heads}")
    if config.position == "rope" and (config.width // config.heads) % 2:
        raise ValueError(f"head width {config.width // config.heads} is odd; rotary positions need an even one")
    if config.value_output == "identity" and config.kv_heads != config.heads:
        raise ValueError(
            f"kv_heads={config.kv_heads} with value_output='identity': values are then all {config.heads} heads of the "
            f"input, and the kernels of attention take as many key heads; use kv_heads={config.heads}"
        )
    alibi = getattr(config.scheme, "alibi_heads", 0)
    if alibi and alibi != config.heads:
        raise ValueError(f"alibi_heads={alibi} differs from heads={config.heads}; use alibi_heads={config.heads}")


def check_choices(config: "ModelConfig") -> None:
    """Refuse words that are not known, numbers that cannot be, and fields that contradict each other."""
    for name, allowed in _CHOICES.items():
        value = getattr(config, name)
        if not any(value is one if isinstance(one, bool) else value == one for one in allowed):
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    if not (_finite(config.rope_base) and config.rope_base > 0):
        raise ValueError(f"rope_base is {config.rope_base!r}; it must be finite and above 0 (10000 is usual)")
    if not _finite(config.query_key_scale):
        raise ValueError(f"query_key_scale is {config.query_key_scale!r}; it must be a finite number (0.1 is usual)")
    skip = config.attention_skip
    if config.preserves_signal and abs(skip.shortcut**2 + skip.residual**2 - 1.0) > 1e-9:
        raise ValueError(
            f"{type(config.scheme).__name__} with attention_skip=({skip.shortcut}, {skip.residual}): SPA needs a "
            "normalised skip, α²+β²=1; use Skip.normalised(α), or Skip() for none"
        )
    if config.head != "lm" and config.classes < 1:
        raise ValueError(f"head={config.head!r} needs classes ≥ 1, the number of outputs; it is {config.classes}")
    if config.head == "lm" and config.classes:
        raise ValueError(
            f"classes={config.classes} with head='lm', which predicts tokens; use head='token' or 'pooled'"
        )
    if config.head == "lm" and not config.causal:
        raise ValueError(
            "a non-causal model sees the token it would predict; use head='token' or 'pooled' for encoders"
        )


def check_mirrored(config: "ModelConfig", given: Any) -> None:
    """Refuse sizes and activations of which no mirrored MLP can be made; `given` is the activation as it was asked for.

    Each direction of the input takes a pair of hidden units, whose difference φ(u) − φ(−u) must be u times a number.
    """
    if config.mlp_init != "mirrored" or not config.hidden:
        return
    hidden, least = config.hidden, 2 * config.width
    if hidden % 2:
        raise ValueError(
            f"hidden={hidden} is odd, and mirrored units come in pairs; use hidden={max(hidden + 1, least)}"
        )
    if hidden < least:
        raise ValueError(
            f"hidden={hidden} makes {hidden // 2} mirrored pairs, fewer than the {config.width} directions of the "
            f"stream, some of which would be lost; use hidden={least} or more"
        )
    if not odd_factor(config.shaped_activation):
        name = given if isinstance(given, str) else config.shaped_activation
        raise ValueError(
            f"activation={name!r} with mlp_init='mirrored': φ(x) − φ(−x) must be a multiple of x, so that pairs of "
            "opposite sign start linear, and here it is not; use 'gelu', 'silu', 'relu', 'leaky_relu' or "
            "'tat-leaky_relu'"
        )
