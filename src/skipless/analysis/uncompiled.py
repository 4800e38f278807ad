"""Running a model's blocks one by one, so that hooks on them run, although it was compiled."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from skipless.nn.attention import ShapedAttention


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None]:
    """In here no module's call is compiled. Where attention is this library's, its kernels still are.

    Elsewhere torch.compile is off altogether, since a compiled function may call blocks from anywhere.
    """
    compiled: list[Any] = [m for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    calls = [module._compiled_call_impl for module in compiled]
    wrapped = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
    ours = any(isinstance(module, ShapedAttention) for module in model.modules())
    for module in compiled:
        module._compiled_call_impl = None
    try:
        with torch.compiler.set_stance("default" if ours and not wrapped else "force_eager"):
            yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call
