"""GPU kernels in Triton, which nothing outside this package imports: each file starts only where one of them runs."""

import importlib.util

INSTALLED = importlib.util.find_spec("triton") is not None
