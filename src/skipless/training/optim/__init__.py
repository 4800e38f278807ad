"""Optimisers: Adam, Muon and SOAP, and the parameter groups that share them."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "adam": ["FusedAdam"],
        "build": ["build_optimizer", "parameter_groups"],
        "muon": ["Muon"],
        "soap": ["SOAP"],
    },
)
