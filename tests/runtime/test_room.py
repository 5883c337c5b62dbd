"""Whether there is memory for a plan."""

import os
import subprocess
import sys

LARGE = 2**30  # more than the libraries take


def test_what_a_process_needed_before_it_became_this_program_is_no_room() -> None:
    # As a launcher's child: what the kernel's account of resources calls the peak is not forgotten then.
    program = "import torch; from mgwfbp.runtime.tune.room import headroom_bytes as h; print(h(torch.device('cpu')))"
    become = f"import os, sys; b'x' * {LARGE}; os.execv(sys.executable, [sys.executable, '-c', {program!r}])"
    done = subprocess.run(
        [sys.executable, "-c", become], capture_output=True, text=True, check=True, timeout=60, env=os.environ
    )
    assert 0 <= float(done.stdout) < LARGE / 4
