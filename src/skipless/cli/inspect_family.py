"""A family of transformers built anew for `skipless inspect`, if its sizes go together and its weights fit."""

from collections.abc import Mapping

import torch
from torch import nn

from skipless.analysis.open_model import FAMILIES, build_family
from skipless.cli.memory import check_fits

_FIELDS = {"depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}


def family(name: str, sizes: Mapping[str, int]) -> nn.Module:
    """The family with the sizes given; what transformers refuses, and what memory cannot hold, ends in one line."""
    asked = " ".join([f"hf:{name}", *(f"--{size} {value}" for size, value in sizes.items())])
    fields = {_FIELDS[size]: value for size, value in sizes.items()}
    try:
        with torch.device("meta"):
            outline = build_family(name, **fields)
    except Exception as error:  # each family checks its sizes in its own way
        why = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        why = why.removeprefix("ValueError: ").rstrip(".")
        raise ValueError(f"{asked} cannot be built: {why}{_nearest_width(name, sizes)}") from error
    check_fits(sum(weight.numel() for weight in outline.parameters()), asked)
    return build_family(name, **fields)


def _nearest_width(name: str, sizes: Mapping[str, int]) -> str:
    """Most families split their width into heads evenly, and rotary positions each head in two."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if (kind := FAMILIES.get(name, name)) not in CONFIG_MAPPING_NAMES:
        return ""
    usual = CONFIG_MAPPING[kind]()
    width, heads = (sizes.get(size) or getattr(usual, _FIELDS[size], None) for size in ("width", "heads"))
    if not width or not heads or width % (2 * heads) == 0:
        return ""
    return f"; use --width {2 * heads * max(round(width / (2 * heads)), 1)}"
