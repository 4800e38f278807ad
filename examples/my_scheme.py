"""A scheme of your own, from its kernels to a trained model and back: python examples/my_scheme.py DATA [OUT].

DATA is a folder that `skipless prepare` made. The scheme also serves the commands:

    skipless kernels smooth --import examples/my_scheme.py
    skipless train e-spa --import examples/my_scheme.py --set model.scheme=smooth --data DATA

E-SPA's kernels e^(−γd) have a corner at distance d = 0: near locations part at once. Those of two filters in a row,
with decays a = e^(−γ) and b = share·a, are flat there, as Matérn kernels are:

    k(d) = (a^(d+1)(1−b²) − b^(d+1)(1−a²)) / ((a−b)(1+ab)),      k(0) = 1.

The paper has no such family. Let a rise with depth as in E-SPA; `carrying` finds the attention from each kernel to the
next, and refuses what no softmax can do (try share = 0.99).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import skipless
from skipless.theory import carrying
from skipless.theory.exponential import decay_rates


@skipless.register_scheme("smooth")  # its name in JSON and on the command line
@dataclass(frozen=True)
class SmoothDecay(skipless.Scheme):
    """Kernels of two exponential filters in a row, the second of decay share·e^(−γ)."""

    gamma_final: float = 0.05
    share: float = 0.5
    repeat_rate: float = 0.0
    preserves_signal = True  # so that queries start at 0
    bounded = True  # tables of `length` locations

    def shapes(self, depth, skip_weight=0.0, causal=True, *, length, **context):
        if skip_weight:
            raise ValueError(f"skip_weight is {skip_weight}; SmoothDecay is made for networks without skips: use 0")
        decays = np.exp(-decay_rates(self.gamma_final, depth)[1:])
        return carrying((self.kernel(a, length) for a in decays), self.repeat_rate, causal, instead="a smaller share")

    def kernel(self, a, length):
        b, d = self.share * a, np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
        return (a ** (d + 1) * (1 - b**2) - b ** (d + 1) * (1 - a**2)) / ((a - b) * (1 + a * b))


def main(data: str, out: str = "runs/smooth") -> None:
    """Certify it, train it, and take it out of the run and back as a Hugging Face model."""
    config = skipless.ModelConfig(
        scheme=SmoothDecay(), depth=8, width=64, heads=4, length=64, vocab_size=257, mlp_init="mirrored"
    )
    print(skipless.certificate(config).verdict.text)
    assert skipless.ModelConfig.from_json(config.to_json()) == config
    experiment = skipless.training.Experiment("smooth", config)
    result = skipless.train(experiment, data=data, out=out, steps=10, batch_size=4, rate=1e-3, compile=False)
    model = skipless.load(out)
    print(f"loss {result.train_loss:.3f}; {model.config.scheme}")
    skipless.hf.SkiplessForCausalLM.from_native(model).save_pretrained(Path(out) / "hf")
    assert skipless.hf.SkiplessForCausalLM.from_pretrained(Path(out) / "hf").config.native() == model.config


if __name__ == "__main__":
    main(*sys.argv[1:])
