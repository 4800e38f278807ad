"""What a run will cost, roughly: arithmetic over a sustained rate, no faster than its blocks can be started."""

from dataclasses import dataclass

from skipless.train.config import Experiment


@dataclass(frozen=True)
class Machine:
    """A machine in three numbers: FLOP/s that training sustains, seconds per block and step at least, start-up."""

    name: str
    flops: float
    block_seconds: float
    start_seconds: float


H200 = Machine("H200", 300e12, 0.4e-3, 12.0)
CPU = Machine("CPU, 2 cores", 60e9, 1.2e-3, 0.2)


def run_seconds(experiment: Experiment, machine: Machine) -> float:
    """Seconds of a run, good to a factor of two or so: 6 FLOP per weight and token, and attention's."""
    model, train = experiment.model, experiment.train
    per_token = 6.0 * model.matrix_parameters + 6.0 * model.depth * model.width * train.length
    arithmetic = per_token * train.batch_size * train.length / machine.flops
    return machine.start_seconds + train.steps * max(arithmetic, machine.block_seconds * model.depth)
