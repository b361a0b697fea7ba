"""Throughput of batches that differ counts what the timed block really held."""

import pytest

from harness.measurement import mean_in_block


@pytest.mark.parametrize(
    "items, size, mean",
    [(20, 50, 20), ([10, 20, 30], 6, 20), ([10, 20, 30], 5, 18), ([10, 20, 30], 1, 10)],
)
def test_items_per_batch_are_those_of_the_block(items, size, mean):
    assert mean_in_block(items, size) == mean
