"""What only a GPU can show of the CUDA graph variant: a replay whose kernels do not write is given away."""

import pytest
import torch

from nvfp4lab.kernels import variants
from nvfp4lab.kernels.poison import untouched_share

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ROWS, COLUMNS = 256, 512


def launch_of(first_stage_calls: int):
    """A call of two kernels, the first of which is launched only in the first calls: stale results may stand in for it."""
    x = torch.arange(ROWS * COLUMNS, device="cuda", dtype=torch.float32).view(ROWS, COLUMNS)
    calls = 0

    def launch() -> torch.Tensor:
        nonlocal calls
        calls += 1
        between = torch.empty_like(x)
        if calls <= first_stage_calls:
            torch.add(x, 1, out=between)
        return between * 2

    return launch, (x + 1) * 2


def test_a_sound_call_is_right_as_a_replay():
    launch, expected = launch_of(first_stage_calls=9)
    for _ in range(3):
        assert torch.equal(variants.replayed(launch), expected)


def test_what_an_earlier_graph_left_is_not_taken_for_a_result():
    for _ in range(3):
        sound, expected = launch_of(first_stage_calls=9)
        assert torch.equal(variants.replayed(sound), expected)
        torch.cuda.empty_cache()
        broken, _ = launch_of(first_stage_calls=1)  # the plain call before the capture is right, the captured one is not
        assert variants.replayed(broken).isnan().all()


def test_a_quantiser_that_writes_nothing_in_its_graph_leaves_the_poison():
    def launch() -> torch.Tensor:
        codes, scales = (torch.empty(ROWS, width, dtype=torch.uint8, device="cuda") for width in (256, 32))
        return torch.cat([codes, scales], dim=1)

    assert untouched_share(variants.replayed(launch)) == 1.0
