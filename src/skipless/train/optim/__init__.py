"""Optimisers, their parameter groups, the rate's schedule and clipping. He et al. 2023, App. H."""

from skipless.train.optim.adam import FusedAdam
from skipless.train.optim.build import build_optimizer, set_rates
from skipless.train.optim.clip import clip_factor, clip_gradients
from skipless.train.optim.config import OptimizerConfig
from skipless.train.optim.groups import freeze, parameter_groups
from skipless.train.optim.muon import Muon, newton_schulz
from skipless.train.optim.schedule import warmup_cosine
from skipless.train.optim.soap import SOAP

__all__ = [
    "SOAP",
    "FusedAdam",
    "Muon",
    "OptimizerConfig",
    "build_optimizer",
    "clip_factor",
    "clip_gradients",
    "freeze",
    "newton_schulz",
    "parameter_groups",
    "set_rates",
    "warmup_cosine",
]
