"""`primal bench model`: training steps of whole models, softmax attention (SDPA) and Primal in the same process.

A step is forward, backward and update; the loss of Primal models includes the KSVD loss. Times are wall times of steps
back to back, launches by the host included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primal_attention.bench import memory
from primal_attention.bench.encoders import ETA, LENGTHS, SPECS, Spec, make_step
from primal_attention.bench.run import ratio, why
from primal_attention.bench.settings import BenchError, OnDevice, check_device, check_out, check_positive
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import collect, load

WARMUP = 4  # steps after the first one


@dataclass(frozen=True)
class ModelSettings(OnDevice):
    """A run of `primal bench model`. Few `tokens` also shorten the sequences."""

    rows: tuple[str, ...] = ()
    tokens: int = 32768
    layers: int | None = None
    device: str | None = None
    repeats: int = 5
    steps: int = 10
    prepare: bool = False
    compiler: str = "inductor"
    seed: int = 0
    out: Path = Path("results/bench")
    name: str | None = None
    commit: str | None = None
    command: str | None = None

    @property
    def file(self) -> Path:
        return self.out / f"{self.name or 'model'}.json"

    def specs(self) -> list[Spec]:
        """All rows, or those that `rows` names by row or by model."""
        chosen = [spec for spec in SPECS if not self.rows or {spec.name, spec.model} & set(self.rows)]
        return [
            dataclasses.replace(
                s, tokens=self.tokens, layers=self.layers or s.layers, length=min(s.length, self.tokens)
            )
            for s in chosen
        ]

    def check(self) -> None:
        check_device(self.device)
        for flag in ("tokens", "layers", "repeats", "steps"):
            if (value := getattr(self, flag)) is not None:
                check_positive(flag, value)
        known = {name: None for spec in SPECS for name in (spec.model, spec.name)}
        for row in self.rows:
            if row not in known:
                raise BenchError(f"--rows {row}: no row or model has this name; known are {', '.join(known)}")
        check_out(self.out, self.name)


def seconds_of(step: Callable[[Tensor], None], x: Tensor, steps: int = 1) -> float:
    """Wall time of one of `steps` steps back to back."""
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step(x)
    wait()
    return (time.perf_counter() - start) / steps


def time_steps(step: Callable[[Tensor], None], x: Tensor, settings: ModelSettings) -> dict[str, float]:
    """Wall time; on a GPU also the time it is busy and the peak of a step, parameters included."""
    seconds_of(step, x, WARMUP)
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    found = {"wall_ms": 1e3 * statistics.median(seconds_of(step, x, settings.steps) for _ in range(settings.repeats))}
    if x.is_cuda:
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            seconds_of(step, x)
        found["busy_ms"] = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    return found


def count_graphs(step: Callable[[Tensor], None], x: Tensor) -> dict[str, int]:
    """Graphs that Dynamo compiles in all, and those that it compiles for nine lengths after the first step."""
    from torch._dynamo.utils import counters

    first = counters["stats"]["unique_graphs"]
    for n in LENGTHS[:-1]:
        part = x[:, : max(2, n * x.shape[1] // LENGTHS[-1])]
        step(part.clone(memory_format=torch.contiguous_format))
    graphs = counters["stats"]["unique_graphs"]
    return {"graphs": graphs, "recompilations": graphs - first}


def measure(spec: Spec, kind: str, settings: ModelSettings, first_only: bool = False) -> dict[str, Any]:
    """A row of the report. An error becomes its one-line text."""
    device = settings.on
    row: dict[str, Any] = {"name": spec.name, "mode": spec.mode, "dtype": spec.dtype, "kind": kind}
    row |= dict.fromkeys(("wall_ms", "busy_ms", "first_s", "peak_mib", "ratio", "peak_ratio", "error"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    memory.free(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    # At the default limit of recompilations Dynamo gives up and counts no more.
    limit = torch._dynamo.config.patch(recompile_limit=64)
    try:
        with on_device, limit, memory.refusing_too_much(device):
            step, x = make_step(spec, kind, device, settings.seed, settings.compiler)
            row["first_s"] = seconds_of(step, x)
            if not first_only:
                row |= count_graphs(step, x) if spec.layout == "dynamic" else time_steps(step, x, settings)
    except Exception as error:  # the other rows still run
        row["error"] = ": ".join(why(error))
    step = x = None  # type: ignore[assignment]
    torch._dynamo.reset()
    memory.free(device)
    return row


def prepare(specs: Sequence[Spec], settings: ModelSettings) -> dict[tuple[str, str], float | None]:
    """Run the first step of all compiled rows in parallel processes. Returns its seconds by name and kind."""
    jobs = [(spec, kind) for spec in specs if spec.mode != "eager" for kind in spec.kinds]
    found: dict[tuple[str, str], float | None] = {}
    workers = max(1, min(len(jobs), (os.cpu_count() or 1) // 2))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers, context) as pool, Progress(len(jobs), "compiling") as progress:
        futures = {pool.submit(measure, spec, kind, settings, True): (spec.name, kind) for spec, kind in jobs}
        for future in as_completed(futures):
            died = future.exception()  # of the process; the row is then compiled when it is timed
            row: dict[str, Any] = {"first_s": None, "error": f"{died}"} if died else future.result()
            found[futures[future]] = row["first_s"]
            progress.advance(f"{', '.join(futures[future])}: {row['error'] or 'compiled'}")
    return found


def run(settings: ModelSettings) -> dict[str, Any]:
    """Measure all rows and return the report, which is written after each of them."""
    settings.check()
    specs = settings.specs()
    values = dataclasses.asdict(settings) | {"out": str(settings.out), "device": str(settings.on), "eta": ETA}
    source = collect(command=settings.command, device=settings.on, commit=settings.commit)
    report: dict[str, Any] = {"format": 1, "kind": "model", **source, "settings": values, "rows": []}
    prepared = prepare(specs, settings) if settings.prepare else {}
    with Progress(sum(len(spec.kinds) for spec in specs), "timing") as progress:
        for spec in specs:
            for kind in spec.kinds:
                row = measure(spec, kind, settings) | {"prepare_s": prepared.get((spec.name, kind))}
                if kind == "primal" and "sdpa" in spec.kinds:
                    base = report["rows"][-1]
                    row["ratio"] = ratio(row["wall_ms"], base["wall_ms"])
                    row["peak_ratio"] = ratio(row["peak_mib"], base["peak_mib"])
                report["rows"].append(row)
                report["hardware"]["load_after"] = load()
                write_json(settings.file, report)
                progress.advance(f"{spec.name}, {kind}: {brief(row)}")
    return report


def brief(row: dict[str, Any]) -> str:
    if row["wall_ms"] is None:
        return row["error"] or f"{row['recompilations']} recompilations over {len(LENGTHS)} lengths"
    return f"{row['wall_ms']:.2f} ms" + (f", {row['ratio']:.2f} × SDPA" if row["ratio"] else "")
