"""Whether there is memory for a plan."""

import os
import subprocess
import sys

import pytest

from mgwfbp.runtime.tune.room import bytes_at_peak

LARGE = 2**30  # more than the libraries take


def test_what_a_process_needed_before_it_became_this_program_is_no_room() -> None:
    # As a launcher's child: what the kernel's account of resources calls the peak is not forgotten then.
    program = "import torch; from mgwfbp.runtime.tune.room import headroom_bytes as h; print(h(torch.device('cpu')))"
    become = f"import os, sys; b'x' * {LARGE}; os.execv(sys.executable, [sys.executable, '-c', {program!r}])"
    done = subprocess.run(
        [sys.executable, "-c", become], capture_output=True, text=True, check=True, timeout=60, env=os.environ
    )
    assert 0 <= float(done.stdout) < LARGE / 4


@pytest.mark.parametrize(
    ("free_bytes", "reserved_bytes", "most_bytes", "expected"),
    [
        (2, 90, 90, 2),  # a GPU that was full, and where activations are gone by now: only what was free then
        (50, 42, 90, 2),  # the same, once the allocator has given memory back
        (10, 90, 60, 40),
        (0, 90, 95, 0),  # another process has taken some
    ],
)
def test_room_in_the_backward_pass_is_what_a_gpu_has_beside_activations(
    free_bytes: int, reserved_bytes: int, most_bytes: int, expected: int
) -> None:
    assert bytes_at_peak(free_bytes, reserved_bytes, most_bytes) == expected
