"""What all benchmarks share: time and memory of a step, the loop over rows, the JSON report, its table and its plot."""

from __future__ import annotations

import gc
import itertools
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from primal_attention.data.storage import one_line
from primal_attention.utils.errors import check_name
from primal_attention.utils.figures import draw_lengths, new_figure
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import collect, device_name

GRAPH, EVENTS, HOST = "CUDA graph", "CUDA events, eager", "torch.utils.benchmark"
OK, OUT_OF_MEMORY, REFUSED, UNSUPPORTED, SKIPPED, FAILED = STATUSES = (
    "ok", "out of memory", "refused", "unsupported", "skipped", "failed",
)  # fmt: skip
Row = dict[str, Any]


def measure_step(step: Callable[[], object], args: Namespace, eager: bool) -> Row:
    """Measure peak memory on a GPU, then time: the pool of a CUDA graph must not exist while memory is counted."""
    step()  # compiles and allocates
    peak = peak_bytes(step, args.device) if args.device.type == "cuda" else None
    return {"peak_bytes": peak, **time_step(step, args, eager)}


def time_step(step: Callable[[], object], args: Namespace, eager: bool) -> Row:
    """Time a step: on a GPU by replays of a CUDA graph between events, on a CPU by torch.utils.benchmark.

    Args:
        step: the work.
        args: flags: `device`, `repeats` (runs on a GPU) and `seconds` (time to measure for on a CPU).
        eager: on a GPU, launch the kernels from the host instead of replaying a graph.

    Returns:
        Median and interquartile range in seconds, number of runs, method, and a note.
    """
    if args.device.type == "cuda":
        with torch.cuda.device(args.device):
            return _time_on_gpu(step, eager, args.repeats)
    from torch.utils.benchmark import Timer

    step()  # the first call allocates and compiles
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    # At least a few runs, so that there are quartiles; slow steps get fewer.
    once = timer.timeit(1).median
    result = timer.blocked_autorange(min_run_time=max(args.seconds, min(6 * once, 8 * args.seconds)))
    runs = len(result.times) * result.number_per_run
    return {"seconds": result.median, "iqr": result.iqr, "runs": runs, "method": HOST, "note": ""}


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a function as a CUDA graph. Nothing has run yet when this returns."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the backward pass has threads of its own
        work()
    return graph


def _time_on_gpu(step: Callable[[], object], eager: bool, repeats: int) -> Row:
    # Whatever is set up on first use must exist before the capture, which needs a side stream.
    stream = torch.cuda.current_stream() if eager else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    step()  # a layer may hold tensors of the side stream's last step
    torch.cuda.synchronize()
    work, method, note = step, EVENTS, ""
    if not eager:
        try:
            work, method = capture(step).replay, GRAPH
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # for example a step that synchronises with the host
            note = f"no CUDA graph: {one_line(error.__context__ or error)}"  # the cause of the failed capture
        if note:
            free_memory(torch.device("cuda"))
            # A failed capture leaves the random generator in capture mode; a successful one resets it.
            capture(lambda: torch.zeros(1, device="cuda").add_(1))
    work()
    # Runs are back to back without synchronisation, so that a slow host shows.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]
    low, median, high = np.percentile(times, (25, 50, 75)).tolist()
    return {"seconds": median, "iqr": high - low, "runs": repeats, "method": method, "note": note}


def free_memory(device: torch.device) -> None:
    """Release what earlier measurements left on a GPU, so that it does not count as the next one's."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:  # one per stream, and every graph capture has its own stream
            clear()
        torch.cuda.empty_cache()


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak of allocated bytes during an eager step on a GPU."""
    free_memory(device)
    step()  # libraries allocate their workspaces again
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def failure(error: Exception) -> Row:
    """Return the status and the note of a row that an error ended."""
    line = one_line(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in line:
        return {"status": OUT_OF_MEMORY, "note": "does not fit into the memory"}
    if line.startswith(("No available kernel", "No viable backend")):
        return {"status": UNSUPPORTED, "note": "torch has no such kernel for this device, dtype and head width"}
    if isinstance(error, (ValueError, NotImplementedError, ImportError)):
        return {"status": UNSUPPORTED, "note": line}
    return {"status": FAILED, "note": f"{type(error).__name__}: {line}"}


# The loop over rows


class Implementation(NamedTuple):
    """A layer or a model by name; `build` takes a shape."""

    name: str
    kind: str
    build: Callable[[Any], Any]


def choose(implementations: Sequence[Implementation], only: Sequence[str], baselines: bool) -> list[Implementation]:
    """Return those that `only` names by name or kind (all but baselines if empty), and with `baselines` these too."""
    kinds = dict.fromkeys(i.kind for i in implementations)
    for name in only:
        check_name(name, [*kinds, *(i.name for i in implementations)], "implementation")
    selected = {*(only or kinds.keys() - {"baseline"}), *(["baseline"] if baselines else [])}
    return [i for i in implementations if {i.name, i.kind} & selected]


def measure_all(
    args: Namespace,
    implementations: Sequence[Implementation],
    measure: Callable[[Implementation, Any, Namespace], Row],
    grid: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    """Measure every implementation at every shape; return the report, which is also written to `args.file`, if set.

    Args:
        args: the flags of the command.
        implementations: what is measured, in the order of the rows.
        measure: returns the numbers of a row, or a status and a note.
        grid: lists of shapes, or of what `build` takes. An implementation that is too slow for a shape skips the others
            in the same list.
    """
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "commit", "file")}
    settings = {name: str(v) if isinstance(v, (Path, torch.device)) else v for name, v in settings.items()}
    origin = collect(command=args.command, device=args.device, commit=args.commit)
    report = {"format": 1, "kind": args.benchmark, **origin, "settings": settings, "rows": []}
    with Progress(len(implementations) * sum(map(len, grid)), "timing") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a large rank; torch's reasons against each SDPA backend
        for shapes in grid:
            torch.compiler.reset()  # Dynamo stops compiling at its limit of graphs per function
            too_slow: dict[str, str] = {}
            for shape in shapes:
                # All implementations at one length before the next, so that compared rows are measured together.
                rows = []
                for implementation in implementations:
                    name, kind, _ = implementation
                    sizes = {size: getattr(shape, size) for size in SIZES} | getattr(shape, "facts", {})
                    row = {"name": name, "kind": kind, **sizes, "status": OK, "note": "", "seconds": None}
                    if name in too_slow:
                        row |= {"status": SKIPPED, "note": too_slow[name]}
                    else:
                        torch.manual_seed(args.seed)
                        try:
                            row |= measure(implementation, shape, args)
                        except Exception as error:  # becomes the note of the row
                            row |= failure(error)
                        free_memory(args.device)
                    if (row["seconds"] or 0.0) > args.limit:
                        too_slow[name] = f"{row['seconds']:.1f} s at {shape.length:,} tokens"
                    rows.append(row)
                    report["rows"].append(row)
                    result = row["status"] if row["seconds"] is None else f"{show_number(1e3 * row['seconds'])} ms"
                    progress.advance(f"{name}, {shape}: {result}")
                    add_ratios(rows)
                    if args.file:  # after every row, in case the process is killed
                        write_json(args.file, report)
    return report


def add_ratios(rows: Sequence[Row]) -> None:
    """Set the speed relative to SDPA at the same shape, and the bytes relative to SDPA's."""
    sdpa = next((row for row in rows if row["name"] == "sdpa" and row["status"] == OK), None)
    for row in rows:
        if sdpa and sdpa["seconds"] and row["seconds"]:
            row["speedup"] = sdpa["seconds"] / row["seconds"]
            for name in ("peak", "saved"):
                used, base = row.get(f"{name}_bytes"), sdpa.get(f"{name}_bytes")
                row[f"{name}_ratio"] = used / base if used is not None and base else None


# The report, its table and its plot

# Numbers of a row: heading and scale in the table.
NUMBERS = {
    "seconds": ("ms", 1e3),
    "iqr": ("IQR ms", 1e3),
    "speedup": ("speed ÷ SDPA's", 1),
    "eager_seconds": ("eager ms", 1e3),
    "tokens_per_second": ("tokens/s", 1),
    "peak_bytes": ("peak MiB", 2**-20),
    "peak_ratio": ("÷ SDPA's", 1),
    "saved_bytes": ("saved MiB", 2**-20),
    "saved_ratio": ("÷ SDPA's", 1),
    "state_bytes": ("state kB", 1e-3),
    "first_seconds": ("first step s", 1),
    "recompilations": ("recompilations", 1),
}
SUBJECTS = {
    "attention": "One attention layer",
    "generate": "One more token after N tokens",
    "model": "Training steps of whole models",
    "lra": "Training steps on Long-Range Arena",
}
SIZES = ("embed_dim", "num_heads", "batch", "length")


def show_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def format_report(report: dict[str, Any]) -> str:
    """Return the report as text, one line per row. The last column says why numbers are missing."""
    table = [["", "", *SIZES, *(heading for heading, _ in NUMBERS.values()), ""]]
    for row in report["rows"]:
        cells = [str(row.get(name, "")) for name in ("model", "name", *SIZES)]
        numbers = [(row.get(name), scale) for name, (_, scale) in NUMBERS.items()]
        cells += ["" if value is None else show_number(scale * value) for value, scale in numbers]
        table.append([*cells, ", ".join(text for text in (row["status"], row["note"]) if text not in (OK, ""))])
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    padded = []
    for column in columns:
        justify = str.rjust if column[0] else str.ljust  # names and notes have no heading
        padded.append([justify(cell, max(map(len, column))) for cell in column])
    return f"{title(report)}\n\n" + "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    subject = [SUBJECTS[report["kind"]], *(name for name in ("causal", "inference") if settings.get(name))]
    if settings.get("layers"):
        subject.append(f"layers: {settings['layers']}")
    machine = [device_name(report["hardware"]), settings.get("dtype"), f"torch {report['versions']['torch']}"]
    return f"{', '.join(subject)}\n{', '.join(filter(None, machine))}"


_MEMORY = {
    "state_bytes": "state per sequence",
    "peak_bytes": "peak memory of a step",
    "saved_bytes": "memory saved for backward",
}


def plot_report(report: dict[str, Any], file: Path) -> list[Path]:
    """Plot time and memory against length as FILE.png and FILE.svg; return the files. Training steps have no plot.

    Each width has its row of panels, in reports on generation each batch too: that of a layer depends on the length.
    """
    rows = [row for row in report["rows"] if row["status"] == OK]
    if not rows or report["kind"] not in ("attention", "generate"):
        return []
    is_layer = report["kind"] == "attention"
    memory = next((name for name in _MEMORY if any(row.get(name) for row in rows)), "saved_bytes")
    panels: dict[str, list[Row]] = {}
    for row in rows:
        name = f"d {row['embed_dim']}, {row['num_heads']} heads" + ("" if is_layer else f", batch {row['batch']}")
        time = row["seconds"] / (row["batch"] * row["length"] if is_layer else 1)
        panels.setdefault(name, []).append({**row, "time": time})
    with new_figure(file, len(panels), 2) as (figure, grid):
        figure.suptitle(title(report))
        for (left, right), (name, panel_rows) in zip(grid, panels.items(), strict=True):
            draw_lengths(left, panel_rows, "time", f"time per {'token' if is_layer else 'step'}", "s")
            draw_lengths(right, panel_rows, memory, _MEMORY[memory], "B")
            left.set_title(name, loc="left")
            right.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return [file.with_name(f"{file.name}.{kind}") for kind in ("png", "svg")]
