"""The number of torch's threads is limited inside the block, never raised, and as before afterwards."""

import pytest
import torch

from nvfp4lab import threads


def test_threads_are_limited_and_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError), threads.at_most(2):
            assert torch.get_num_threads() == 2
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
        with threads.at_most(8):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
