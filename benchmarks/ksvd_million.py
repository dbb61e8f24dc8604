"""Kernel SVD of a kernel too large to form, in the primal: time, peak memory, and whether the answer is right.

    python benchmarks/ksvd_million.py                  # one source: 1,000,000 rows, 64 features
    python benchmarks/ksvd_million.py --two-sources    # 1,000,000 queries and 1,000,000 keys
    python benchmarks/ksvd_million.py --rows 100000

Prints one JSON object. `residual` is max(‖K H_r − H_e Σ‖, ‖Kᵀ H_e − H_r Σ‖) / ‖Σ‖, with K applied through its features;
`orthonormality` is the largest entry of H_eᵀH_e − I and H_rᵀH_r − I. The command fails when either is above 1e-8.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time

import numpy as np

from primal_attention.ksvd import KernelSVD


def peak_gib() -> float:
    """Peak resident memory of this process; the kernel reports KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def correlated_rows(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Rows whose directions have unequal weight, so that the singular values differ."""
    X = rng.standard_normal((rows, width))
    X *= np.linspace(2.0, 0.1, width)
    return X


def unit_rows(X: np.ndarray) -> np.ndarray:
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--two-sources", action="store_true", help="separate keys, as many as queries")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    X = correlated_rows(rng, args.rows, args.width)
    Z = correlated_rows(rng, args.rows, args.width) if args.two_sources else X
    data_gib = (X.nbytes + (Z.nbytes if args.two_sources else 0)) / 2**30

    start = time.perf_counter()
    ksvd = KernelSVD(args.components, kernel="cosine", solver="primal").fit(X, Z=Z)
    seconds = time.perf_counter() - start
    peak = peak_gib()  # before the check below, which holds whole feature matrices

    left, sigma, right = ksvd.left_vectors_, ksvd.singular_values_, ksvd.right_vectors_
    phi_q, phi_k = unit_rows(X), unit_rows(Z)
    residual = max(
        np.linalg.norm(phi_q @ (phi_k.T @ right) - left * sigma),
        np.linalg.norm(phi_k @ (phi_q.T @ left) - right * sigma),
    ) / np.linalg.norm(sigma)
    identity = np.eye(args.components)
    orthonormality = max(np.abs(left.T @ left - identity).max(), np.abs(right.T @ right - identity).max())

    result = {
        "rows": args.rows,
        "width": args.width,
        "components": args.components,
        "sources": 2 if args.two_sources else 1,
        "fit_seconds": round(seconds, 2),
        "peak_gib": round(peak, 2),
        "data_gib": round(data_gib, 2),
        "objective_over_sigma_sum": float(ksvd.objective_ / sigma.sum()),
        "residual": float(residual),
        "orthonormality": float(orthonormality),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(result, indent=2))
    return 0 if residual < 1e-8 and orthonormality < 1e-8 else 1


if __name__ == "__main__":
    raise SystemExit(main())
