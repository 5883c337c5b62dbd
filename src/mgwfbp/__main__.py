"""``mgwfbp`` and ``python -m mgwfbp``: first what Ctrl-C does, then the command line, which takes a while to import."""

import os

try:
    import signal
    import sys
except KeyboardInterrupt:
    os._exit(130)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main"]

INTERRUPTED = 128 + signal.SIGINT
SHOW_CURSOR = b"\x1b[?25h"  # which a progress bar hides


def main() -> None:
    """Run the command line and leave with its status."""
    # Where Ctrl-C is ignored, as behind nohup or in the background of a script, it stays so.
    heeds_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupts:
        signal.signal(signal.SIGINT, _leave)
    from mgwfbp.cli import run

    if sys.stdout is not None:
        # A name that the terminal's encoding lacks is shown as Python writes it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # it is what Python made
    try:
        if heeds_interrupts:
            signal.signal(signal.SIGINT, _interrupt)
        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # a moment before or after it is caught where it belongs
        status = INTERRUPTED
    if heeds_interrupts:
        signal.signal(signal.SIGINT, _leave)
    # Python ends by SIGINT where a KeyboardInterrupt came out of an exec(), caught or not; the next exec() forgets it.
    exec("")  # noqa: S102
    sys.exit(status)


def _leave(*_: object) -> None:
    """End at once: nothing has begun, or all is done."""
    os._exit(INTERRUPTED)


def _interrupt(_number: int, frame: "FrameType | None") -> None:
    """Raise KeyboardInterrupt, but not in the middle of an import.

    There it could end up anywhere: some take it for a missing module, and what is written in C++ ends the process with
    a core dump. What is imported late is torch and the like, before there is anything to clean up.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
