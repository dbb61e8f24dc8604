"""`python -m primal_attention.bench attention …`: the command where only torch is installed."""

from __future__ import annotations

import sys

from primal_attention.cli.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m primal_attention.bench"))
