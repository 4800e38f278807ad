"""A whole network on FlexAttention: no T×T tensor in its forward, and one compiled kernel for all blocks."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA, UniformSPA

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(scheme, impl):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=40, width=32, depth=6, heads=2, scheme=scheme, activation="gelu")
    return Transformer(config, impl=impl).to(DEVICE).eval()


def largest_allocation(call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    return max(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")


@torch.no_grad()
@pytest.mark.parametrize("scheme", [ExponentialSPA(0.005, 0.008), UniformSPA(0.8, 0.008)])
def test_six_blocks_at_8192_locations_form_no_square_tensor_and_share_one_kernel(scheme):
    length = 8192
    model = build(scheme, "flex")
    tokens = torch.randint(0, 40, (1, length), device=DEVICE)
    torch._dynamo.reset()
    counters.clear()
    first = model(tokens)
    assert counters["stats"]["unique_graphs"] == 1
    assert largest_allocation(lambda: model(tokens)) <= length * 4 * 32 * 4  # the MLP in float32; T×T booleans are 16x
    short = build(scheme, "reference")
    short.load_state_dict(model.state_dict())
    torch.testing.assert_close(first[:, :500], short(tokens[:, :500]), atol=2e-4, rtol=0)
