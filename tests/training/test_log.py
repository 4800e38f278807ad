"""What a run shows: the line's numbers, and model FLOP utilisation where the device is known."""

import pytest
import torch

from skipless.training.distributed import World
from skipless.training.run import Display, Line, RunFolder, flops_per_token
from skipless.training.trainer import Trainer

LINE = Line(10, 5.4321, 5.5, 1e-3, 0.25, 100_000.0)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("NVIDIA H200", "MFU 51%"),
        ("NVIDIA H100 80GB HBM3", "MFU 51%"),
        ("NVIDIA A100-SXM4-80GB", "MFU 160%"),
        ("CPU", None),
        ("Some other GPU", None),
    ],
)
def test_utilisation_is_shown_where_the_peak_is_known(device, words, capsys):
    """5e9 FLOP a token, 100,000 tokens a second: 5e14 of 9.89e14, or of 3.12e14."""
    display = Display("run", 100, flops_per_token=5e9, device=device)
    display.show(LINE)
    text = capsys.readouterr().err
    assert "run 10/100  loss 5.432  ema 5.500  grad 0.25  100,000 tok/s" in text
    assert (words in text) if words else ("MFU" not in text)


def test_a_token_costs_six_per_weight_and_attention(experiment):
    """Eight blocks of 12·32² and a tied embedding of 256·32; causal attention's scores and values, 6·8·32·32 more."""
    weights = 8 * 12 * 32**2 + 256 * 32
    assert experiment.model.matrix_parameters == weights
    assert flops_per_token(weights, experiment) == 6 * weights + 6 * 8 * 32 * 32


@pytest.mark.parametrize("processes", [1, 4])
def test_utilisation_is_of_all_devices(experiment, tmp_path, processes):
    """The line counts the tokens of all processes, and the peak is one device's."""
    world = World(0, processes, torch.device("cpu"))
    with RunFolder.open(tmp_path / "run", experiment, resume=False) as run:
        opened = Trainer(experiment, world, run, quiet=True)
    whole = flops_per_token(experiment.model.matrix_parameters, experiment)
    assert opened.display.flops_per_token == whole / processes
    assert opened.feed.loader.batch(0).tokens.shape[0] == experiment.train.batch_size // processes
