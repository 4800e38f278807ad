"""On a CUDA device: no step waits for it, and a captured step is the eager one."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.config import OptimizerConfig
from skipless.training.optim.adam import clip_gradients
from skipless.training.optim.build import build_optimizer, set_rates
from skipless.training.optim.muon import newton_schulz

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(vocab_size=64, width=64, depth=2, heads=2, activation="gelu")


def build():
    torch.manual_seed(0)
    return Transformer(CONFIG).cuda()


@contextmanager
def waiting_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def fill_gradients(model, step):
    generator = torch.Generator("cuda").manual_seed(step)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device="cuda")
        parameter.grad = noise if parameter.grad is None else parameter.grad.copy_(noise)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_steps_do_not_wait_for_the_device(name, capturable):
    model = build()
    optimizer = build_optimizer(model, OptimizerConfig(name, weight_decay=0.1), capturable=capturable)
    with waiting_is_an_error():
        for step in range(3):
            fill_gradients(model, step)
            set_rates(optimizer, 0.5)
            clip_gradients(model.parameters(), 0.1)
            optimizer.step()


@pytest.mark.parametrize("capturable", [False, True])
def test_soap_does_not_wait_between_renewals(capturable):
    model = build()
    optimizer = build_optimizer(model, OptimizerConfig("soap", precondition_every=100), capturable=capturable)
    fill_gradients(model, 0)
    for _ in range(2):  # the second takes note of how many there were
        optimizer.step()
        optimizer.renew()
    with waiting_is_an_error():
        optimizer.step()
        optimizer.renew()


def renew(optimizer):
    if hasattr(optimizer, "renew"):
        optimizer.renew()


@pytest.mark.parametrize("name", ["adam", "muon", "soap"])
def test_a_captured_step_is_the_eager_one_and_follows_set_rates(name):
    model = build()
    config = OptimizerConfig(name, weight_decay=0.1, precondition_every=2)
    optimizer = build_optimizer(model, config, capturable=True)
    fill_gradients(model, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # makes the state, as capture asks
        clip_gradients(model.parameters(), 0.1)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    renew(optimizer)
    other = copy.deepcopy(model)
    eager = build_optimizer(other, config)
    eager.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clip_gradients(model.parameters(), 0.1)
        optimizer.step()
    for step in range(1, 4):
        for network in (model, other):
            fill_gradients(network, step)
        set_rates(optimizer, 1 / step)
        graph.replay()
        renew(optimizer)
        set_rates(eager, 1 / step)
        clip_gradients(other.parameters(), 0.1)
        eager.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_newton_schulz_stays_orthogonal():
    x = torch.randn(4, 128, 256, device="cuda")
    values = torch.linalg.svdvals(newton_schulz(x.bfloat16()).float())
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_a_gpu_run_resumes_on_a_cpu():
    model = build()
    optimizer = build_optimizer(model, OptimizerConfig("muon"), capturable=True)
    fill_gradients(model, 0)
    optimizer.step()
    other = copy.deepcopy(model).cpu()
    resumed = build_optimizer(other, OptimizerConfig("muon"))
    resumed.load_state_dict(optimizer.state_dict())
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    resumed.step()
    assert all(p.isfinite().all() for p in other.parameters())
