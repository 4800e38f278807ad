"""Inspect any PyTorch transformer: what every block does to the signal and to its gradient.

To read in this order, which is that of `inspect`:

    measured   stacks (where blocks are), hooks and statistics, attention, gradients: one forward and one backward;
               probes and wiring: a few rows more
    evidence   evidence: all that was measured of one stack
    named      siblings (parameters), faults and branches: the block at fault; notes: what may be meant
    said       diagnosis: verdict and advice; inspection: the result
"""

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
