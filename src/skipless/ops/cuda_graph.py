"""CUDA graphs of a function that reads and writes fixed tensors: recorded once, then replayed by one call."""

from collections.abc import Callable

import torch
from torch import Tensor

Replay = Callable[[], tuple[Tensor, ...]]


class CudaRecorder:
    """Makes a graph of a function. Tests put a class with the same two methods in its place.

    It captures on the stream that it warms up on, since a backward pass runs on the stream of its forward pass.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run the function on the side stream, in order with the current one."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def capture(self, function: Replay) -> Replay:
        """The function's work as one call, which returns the same tensors each time; nothing runs yet.

        Errors are looked for in this thread only: a loader's own thread may pin memory meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            outputs = function()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay
