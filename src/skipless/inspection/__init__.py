"""Inspect any PyTorch transformer: what every block does to the signal and to its gradient."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "ablation": ["rounding"],
        "callback": ["SignalCallback", "lightning_callback", "trainer_callback"],
        "inspect": ["assert_signal_preserved"],
        "inspection": ["BlockSignal", "Inspection"],
        "studies": ["study"],
    },
)
