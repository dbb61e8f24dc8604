"""Run the kernel tests on a GPU and store their log.

    python benchmarks/gpu_tests.py [--commit SHA] [--out results/gpu-tests.json] [pytest arguments]

The file holds the outcome of every test, the reasons of skips and failures, and where it ran.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from primal_attention.utils.files import write_json
from primal_attention.utils.provenance import collect

TESTS = ["tests/ops"]


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """The outcome of a test and its reason."""
    for name in ("failure", "error", "skipped"):
        if (node := case.find(name)) is not None:
            return name, (node.get("message") or "").splitlines()[0][:200]
    return "passed", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="commit of the code where git cannot tell it")
    parser.add_argument("--out", type=Path, default=Path("results/gpu-tests.json"))
    own, others = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("these tests need a CUDA device", file=sys.stderr)
        return 2
    arguments = [*(others or TESTS)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.xml"
        code = pytest.main([*arguments, f"--junitxml={log}", "-q", "--tb=short"])
        tests: dict[str, dict[str, int]] = {}
        reasons: list[dict[str, str]] = []
        seconds = 0.0
        for case in ElementTree.parse(log).getroot().iter("testcase"):
            result, why = outcome(case)
            module = (case.get("classname") or "").replace(".", "/") + ".py"
            tests.setdefault(module, Counter())[result] += 1  # type: ignore[arg-type]
            seconds += float(case.get("time") or 0)
            if result != "passed":
                reasons.append({"test": f"{module}::{case.get('name')}", "outcome": result, "reason": why})
    command = f"python {' '.join(['benchmarks/gpu_tests.py', *others])}"
    total: Counter[str] = sum((Counter(counts) for counts in tests.values()), Counter())
    report: dict[str, Any] = collect(command=command, device=torch.device("cuda"), commit=own.commit)
    report |= {"exit_code": int(code), "total": dict(total), "test_seconds": round(seconds, 1)}
    write_json(own.out, report | {"files": {k: dict(v) for k, v in sorted(tests.items())}, "not_passed": reasons})
    print(dict(total), own.out)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
