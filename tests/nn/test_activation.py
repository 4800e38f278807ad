import numpy as np
import pytest
import torch

from skipless.nn.block import Activation
from skipless.theory.activations import ShapedActivation
from skipless.theory.shaping import dks, tat_leaky_relu

SPECS = [
    *(
        ShapedActivation(base)
        for base in ("gelu", "gelu_tanh", "tanh", "softplus", "sigmoid", "silu", "relu", "sin", "identity")
    ),
    dks("gelu", 36),
    tat_leaky_relu(36),
    ShapedActivation("tanh", input_scale=0.5, input_shift=0.2, output_shift=-0.1, output_scale=3.0),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.base)
def test_module_computes_what_theory_analyses(spec):
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64, requires_grad=True)
    y = Activation(spec)(x)
    np.testing.assert_allclose(y.detach().numpy(), spec(x.detach().numpy()), atol=1e-13)
    (slope,) = torch.autograd.grad(y.sum(), x)
    away = np.abs(x.detach().numpy()) > 1e-9  # rectifiers have no derivative at the kink
    np.testing.assert_allclose(slope.numpy()[away], spec.derivative(x.detach().numpy())[away], atol=1e-12)
