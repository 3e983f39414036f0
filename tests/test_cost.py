"""Transfer model: the constrained line is the best one, and bad measurements are refused."""

import numpy as np
import pytest
from dualdeadline.cost import TransferModel
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.lists(st.integers(0, 10**8), min_size=2, max_size=12, unique=True)


def error(model, size, ms):
    return float(((model.ms(size) - ms) ** 2).sum())


@given(size=SIZES, intercept=st.floats(0, 1), slope=st.floats(0, 1e-6))
@settings(max_examples=60, deadline=None)
def test_recovers_an_exact_line(size, intercept, slope):
    size = np.array(size, float)
    model = TransferModel.fit(size, intercept + slope * size)
    assert np.allclose(model.ms(size), intercept + slope * size, atol=1e-6)


@given(size=SIZES, seed=st.integers(0, 9999))
@settings(max_examples=100, deadline=None)
def test_no_other_allowed_line_is_better(size, seed):
    draw = np.random.default_rng(seed)
    size, ms = np.array(size, float), draw.random(len(size))
    model = TransferModel.fit(size, ms)
    assert model.intercept_ms >= 0 and model.slope_ms >= 0
    best, scale = error(model, size, ms), 1 / size.max()
    for _ in range(30):
        intercept = max(0.0, model.intercept_ms + draw.normal() * 10 ** draw.uniform(-4, 0))
        slope = max(0.0, model.slope_ms + draw.normal() * 10 ** draw.uniform(-4, 0) * scale)
        assert error(TransferModel(intercept, slope), size, ms) >= best - 1e-9


def test_falling_times_become_a_constant_and_a_negative_intercept_becomes_zero():
    assert TransferModel.fit([1, 2, 3], [3, 2, 1]) == TransferModel(2.0, 0.0)
    steep = TransferModel.fit([1, 2, 3], [0, 1, 2])
    assert steep.intercept_ms == 0 and np.isclose(steep.slope_ms, 8 / 14)


def test_one_size_gives_a_float_and_many_an_array():
    model = TransferModel(0.5, 1e-6)
    assert isinstance(model.ms(10**6), float) and model.ms(10**6) == 1.5
    assert model.ms([[0, 10**6]]).tolist() == [[0.5, 1.5]]
    assert np.isclose(model.gbps, 1.0) and TransferModel(1.0, 0.0).gbps == float("inf")


@pytest.mark.parametrize("size, ms, message", [
    ([1, 2], [1], "one length"), ([1], [1], "at least 2"), ([5, 5], [1, 2], "at least 2"), ([], [], "at least 2"),
    ([1, -2], [1, 1], "finite"), ([1, 2], [1, -1], "finite"), ([1, 2], [1, np.nan], "finite"),
    ([1, np.inf], [1, 1], "finite"), ([[1, 2]], [[1, 2]], "one length"),
])
def test_bad_measurements_are_refused(size, ms, message):
    with pytest.raises(ValueError, match=message):
        TransferModel.fit(size, ms)


@pytest.mark.parametrize("size", [-1, [1, -1], np.nan])
def test_bad_sizes_are_refused(size):
    with pytest.raises(ValueError, match="not below 0"):
        TransferModel(0.1, 1e-6).ms(size)
