"""Linear layers of one input: called as they are, or in a decoding step of few rows by one kernel for all of them."""

from typing import cast

from torch import Tensor, nn

from skipless.nn.bare import is_bare
from skipless.ops import few_rows


def applied(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """layer(x) of each. Modules in a Linear's place, or hooks on one, are called as they are."""
    bare = [type(layer) is nn.Linear and is_bare(layer) for layer in layers]
    plain = [cast(nn.Linear, layer) for layer, is_plain in zip(layers, bare, strict=True) if is_plain]
    biased = len(plain) > 1 and any(layer.bias is not None for layer in plain)
    if not plain or biased or not few_rows.serves(x, [layer.weight for layer in plain]):
        return [layer(x) for layer in layers]
    from skipless.ops.few_rows_kernel import few_rows_linear

    together = few_rows_linear(x, [layer.weight for layer in plain], plain[0].bias)
    parts = iter(together.split([layer.out_features for layer in plain], dim=-1))
    return [next(parts) if is_plain else layer(x) for layer, is_plain in zip(layers, bare, strict=True)]
