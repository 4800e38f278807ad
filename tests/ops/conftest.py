import pytest
import torch

from skipless.ops import gpu


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch):
    """The interpreter's time goes by the number of tiles: 64 × 64 in any precision, so that 100 tokens have edges."""
    if gpu.INSTALLED and not torch.cuda.is_available():
        from skipless.ops.gpu import launch, rotary
        from skipless.ops.gpu.launch import Launch, Sizes

        for module in (launch, launch, rotary):
            monkeypatch.setattr(module, "sizes", lambda width, dtype: Sizes(*[Launch(64, 64, 4, 1)] * 4))
