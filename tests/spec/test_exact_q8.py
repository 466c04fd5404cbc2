"""The same as test_exact.py with the recurrent state in eight bits, for another worker."""

from __future__ import annotations

import pytest

from tests.spec.exact import BATCHES, check_every_depth, check_mixed_depths


@pytest.mark.parametrize("batch", BATCHES)
def test_every_token_and_every_state(batch: int) -> None:
    check_every_depth(batch, "q8")


@pytest.mark.parametrize("batch", BATCHES)
def test_depths_mixed_within_a_request(batch: int) -> None:
    check_mixed_depths(batch, "q8")
