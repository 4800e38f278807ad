"""Skips that fall during training: at every α the network is the one that was built for it."""

import numpy as np
import pytest
import torch
from torch import nn

from skipless.model import signal
from skipless.model.config import ModelConfig
from skipless.model.fold import fold
from skipless.model.transformer import Transformer
from skipless.theory import kernels
from skipless.theory.propagation import Skip, forward
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA
from skipless.theory.shaping import dks
from skipless.train.anneal import SkipAnneal, SkipCourse, set_skip

IDS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))


def config(alpha: float = 0.9, **changes) -> ModelConfig:
    skip = Skip.normalised(alpha) if alpha else Skip()
    sizes = {"vocab_size": 64, "width": 32, "depth": 6, "heads": 4, "length": 24, "activation": "gelu"}
    scheme = ExponentialSPA(0.5, 0.05, calibration="exact")
    return ModelConfig(**{**sizes, "scheme": scheme, "attention_skip": skip, "mlp_skip": skip, **changes})


def network(alpha: float = 0.9, **changes) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config(alpha, **changes))
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "scheme",
    [
        ExponentialSPA(0.5, 0.05, calibration="exact"),
        ExponentialSPA(0.5, 0.05),
        UniformSPA(0.3, 0.05, calibration="exact"),
        UniformSPA(0.3, 0.05),
        StandardAttention(),
    ],
)
@pytest.mark.parametrize("hidden", [64, 0])
def test_at_every_alpha_it_is_the_network_built_for_it(scheme, hidden):
    model = network(scheme=scheme, hidden=hidden)
    model(IDS)  # the shape's tensors exist
    anneal = SkipAnneal(model, SkipCourse(0.9, begin=2, end=6))
    for step, share in [(0, 0.0), (2, 0.0), (4, 0.5), (6, 1.0), (9, 1.0)]:
        alpha = anneal(step)
        assert alpha == pytest.approx(np.cos(np.arccos(0.9) + share * np.arcsin(0.9)) if share < 1 else 0.0)
        fresh = Transformer(config(alpha, scheme=scheme, hidden=hidden))
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(IDS), fresh(IDS), atol=1e-5, rtol=1e-5)
    assert model.config.skipless
    assert model.config == config(0.0, scheme=scheme, hidden=hidden)


def test_a_network_that_was_first_used_in_inference_mode_can_be_annealed_and_trained():
    model = network()
    with torch.inference_mode():
        model(IDS)
    SkipAnneal(model, SkipCourse(0.9, begin=0, end=6))(3)
    model(IDS, targets=IDS).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_average_kernel_keeps_its_diagonal_at_every_alpha():
    """What "recalibrated" means: unit norms all the way down, for each α of the course."""
    model, start = network(activation=dks("gelu", 12), depth=12), kernels.uniform(0.05, 24)
    anneal = SkipAnneal(model, SkipCourse(0.9, 0, 5))
    for step in range(6):
        anneal(step)
        for state in forward(signal.kernel_blocks(model.config), start):
            np.testing.assert_allclose(np.diagonal(state), 1.0, atol=1e-9)


def test_tensors_are_overwritten_where_they_lie():
    model = network()
    model(IDS)
    held = [block.layers()[0]._parts.tensors() for block in model.each_block()]
    before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in held]
    set_skip(model, Skip.normalised(0.3))
    model(IDS)
    for block, tensors, old in zip(model.each_block(), held, before, strict=True):
        now = block.layers()[0]._parts.tensors()
        assert all(now[name] is tensors[name] for name in tensors)
        assert not torch.equal(now["slope"], old["slope"])


def test_every_few_steps_and_at_the_end():
    anneal = SkipAnneal(network(), SkipCourse(0.9, 0, 10), every=4)
    alphas = [anneal(step) for step in range(12)]
    assert len({round(alpha, 9) for alpha in alphas}) == 4
    assert alphas[0] == alphas[3] > alphas[4] == alphas[7] > alphas[8] == alphas[9] > alphas[10] == alphas[11] == 0.0


def test_a_network_trains_through_it_and_can_then_be_folded():
    model = network(activation=dks("gelu", 12), depth=12)
    optimizer, anneal, losses = torch.optim.Adam(model.parameters(), 1e-3), SkipAnneal(model, SkipCourse(0.9, 2, 8)), []
    for step in range(12):
        anneal(step)
        loss = nn.functional.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert model.config.vanilla
    with torch.no_grad():
        torch.testing.assert_close(fold(model)(IDS), model(IDS), atol=2e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_what_cannot_be_annealed_is_named():
    with pytest.raises(ValueError, match=r"attention_skip is 0.9 and the course starts at 0.98"):
        SkipAnneal(network(), SkipCourse(0.98, 0, 5))
    with pytest.raises(ValueError, match="0 ≤ begin < end"):
        SkipCourse(0.9, 5, 5)
    with pytest.raises(ValueError, match="every is 0"):
        SkipAnneal(network(), SkipCourse(0.9, 0, 5), every=0)
    with pytest.raises(ValueError, match="the blocks are compiled"):
        SkipAnneal(network().compile_blocks(), SkipCourse(0.9, 0, 5))
    trained = network(mlp_skip=Skip(0.9, 0.1, trainable=True))
    with pytest.raises(ValueError, match="mlp_skip is trainable"):
        SkipAnneal(trained, SkipCourse(0.9, 0, 5))
    with pytest.raises(ValueError, match="keep the kind"):
        network().blocks[0].attention.inner.change_shape(StandardAttention().shapes(1)[0])
