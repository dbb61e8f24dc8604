"""Entry point of the command: handles Ctrl-C before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` alone takes longer to import than the rest of this file
if TYPE_CHECKING:
    from types import FrameType


def interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler: leave at once while modules load, where an exception may be replaced or ignored."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> int:
    """Run the command with the words of `sys.argv`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    from primal_attention.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
