from collections.abc import Callable

import pytest
import torch

from skipless.ops import gpu


@pytest.fixture(autouse=True)
def tiles(monkeypatch) -> Callable[[int], None]:
    """Sets the tiles of the interpreter, whose time goes by their number: 64 × 64, so that 100 tokens have edges."""

    def sized(rows: int) -> None:
        if gpu.INSTALLED and not torch.cuda.is_available():
            from skipless.ops.gpu import launch, rotary
            from skipless.ops.gpu.launch import Launch, Sizes

            for module in (launch, rotary):
                monkeypatch.setattr(module, "sizes", lambda width, dtype: Sizes(*[Launch(rows, rows, 4, 1)] * 4))

    sized(64)
    return sized
