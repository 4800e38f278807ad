import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory.annealing import rotated_skip
from skipless.theory.propagation import Skip


@given(st.floats(0.0, 0.9999), st.floats(0.0, 1.0))
def test_the_skip_stays_normalised(start, share):
    skip = rotated_skip(start, share)
    assert skip.shortcut**2 + skip.residual**2 == pytest.approx(1.0, abs=1e-14)
    assert 0.0 <= skip.shortcut <= start + 1e-12


def test_it_begins_at_the_start_and_ends_without():
    assert rotated_skip(0.98, 0.0).shortcut == pytest.approx(0.98, abs=1e-14)
    assert rotated_skip(0.98, 1.0) == Skip()
    half = rotated_skip(0.98, 0.5)
    assert math.acos(half.shortcut) == pytest.approx((math.acos(0.98) + math.pi / 2) / 2)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        rotated_skip(0.9, 1.5)
    with pytest.raises(ValueError, match="normalised skip needs 0 ≤ α < 1"):
        rotated_skip(1.0, 0.5)
