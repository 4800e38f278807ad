import pytest
import torch

from skipless.ops import triton


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch):
    """The interpreter's time goes by the number of tiles: 64 × 64 in any precision, so that 100 tokens have edges."""
    if triton.INSTALLED and not torch.cuda.is_available():
        from skipless.ops.triton import launch, op, turned
        from skipless.ops.triton.sizes import Launch, Sizes

        for module in (launch, op, turned):
            monkeypatch.setattr(module, "sizes", lambda width, dtype: Sizes(*[Launch(64, 64, 4, 1)] * 4))
