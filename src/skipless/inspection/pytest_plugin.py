"""A fixture for pytest: `pytest_plugins = ["skipless.inspection.pytest_plugin"]` in a project's conftest.py.

def test_the_signal_survives(assert_signal_preserved):
    assert_signal_preserved(build_model(), batch)
"""

from collections.abc import Callable
from typing import Any

import pytest

from skipless.inspection.inspection import Inspection


@pytest.fixture
def assert_signal_preserved() -> Callable[..., Inspection]:
    """skipless.assert_signal_preserved, whose failure is the verdict, what to do, and the blocks around it."""
    from skipless.inspection.inspect import assert_signal_preserved as check

    def checked(*args: Any, **options: Any) -> Inspection:
        __tracebackhide__ = True
        try:
            return check(*args, **options)
        except AssertionError as error:
            said = str(error)
        pytest.fail(said, pytrace=False)  # out here, or pytest prints it twice: as the cause too

    return checked
