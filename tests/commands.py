"""Commands that start workers, run as a user runs them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Not what a launcher has set around the tests; and workers count their threads themselves.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "OMP_NUM_THREADS")}
# Commands run in a folder of their own and still find the factories of the tests.
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])


def mgwfbp(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command, by itself or under a launcher; whatever happens, nobody sees a traceback."""
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "mgwfbp", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done
