"""What all benchmarks share: timing, memory, the JSON report, its table and its plot."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primal_attention.utils.files import COUNT, Number, check, write_atomically, write_json
from primal_attention.utils.provenance import collect, device_name, load

GRAPH, EVENTS, HOST = "CUDA graph", "CUDA events, eager", "torch.utils.benchmark"
OK, OUT_OF_MEMORY, REFUSED, UNSUPPORTED, SKIPPED, FAILED = STATUSES = (
    "ok", "out of memory", "refused", "unsupported", "skipped", "failed",
)  # fmt: skip
Row = dict[str, Any]


# Time


def time_step(
    step: Callable[[], object], device: torch.device, eager: bool = False, repeats: int = 20, seconds: float = 0.5
) -> Row:
    """Time a step: on a GPU by replays of a CUDA graph between events, on a CPU by torch.utils.benchmark.

    Args:
        step: the work.
        device: where it runs.
        eager: on a GPU, launch the kernels from the host instead of replaying a graph.
        repeats: runs on a GPU.
        seconds: time to measure for on a CPU.

    Returns:
        Median and interquartile range in seconds, number of runs, method, and a note.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_on_gpu(step, eager, repeats)
    from torch.utils.benchmark import Timer

    step()  # the first call allocates and compiles
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    # At least a few runs, so that there are quartiles; slow steps get fewer.
    once = timer.timeit(1).median
    result = timer.blocked_autorange(min_run_time=max(seconds, min(6 * once, 8 * seconds)))
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
            note = f"no CUDA graph: {first_line(error.__context__ or error)}"  # the cause of the failed capture
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


# Memory and errors


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


def first_line(error: BaseException) -> str:
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())


def failure(error: Exception) -> tuple[str, str]:
    """Return the status and the note of a row that an error ended."""
    line = first_line(error)[:200]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in line:
        return OUT_OF_MEMORY, "does not fit into the memory"
    if line.startswith(("No available kernel", "No viable backend")):
        return UNSUPPORTED, "torch has no such kernel for this device, dtype and head width"
    if isinstance(error, (ValueError, NotImplementedError, ImportError)):
        return UNSUPPORTED, line
    return FAILED, f"{type(error).__name__}: {line}"


# The report: provenance, settings and rows


def start_report(kind: str, args: Namespace) -> dict[str, Any]:
    """Return a report without rows: provenance and the flags."""
    values = {name: value for name, value in vars(args).items() if name not in ("command", "commit", "file")}
    plain = {name: str(v) if isinstance(v, (Path, torch.device)) else v for name, v in values.items()}
    origin = collect(command=args.command, device=args.device, commit=args.commit)
    return {"format": 1, "kind": kind, **origin, "settings": plain, "rows": []}


def write_report(file: Path, report: dict[str, Any]) -> None:
    report["hardware"]["load_after"] = load()
    write_json(file, report)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


# Numbers of a row: heading and scale in the table.
_NUMBERS = {
    "seconds": ("ms", 1e3),
    "iqr": ("IQR ms", 1e3),
    "speedup": ("speed ÷ SDPA's", 1),
    "tokens_per_second": ("tokens/s", 1),
    "first_seconds": ("first step s", 1),
    "peak_bytes": ("peak MiB", 2**-20),
    "peak_ratio": ("÷ SDPA's", 1),
    "saved_bytes": ("saved MiB", 2**-20),
    "saved_ratio": ("÷ SDPA's", 1),
    "state_bytes": ("state kB", 1e-3),
    "recompilations": ("recompilations", 1),
}
SIZES = ("embed_dim", "num_heads", "batch", "length")
_OPTIONAL = (Number(least=0), None)
_ROW = {
    "name": str,
    **dict.fromkeys(("label?", "note?", "model?"), str),
    "status": frozenset(STATUSES),
    **dict.fromkeys(SIZES, COUNT),
    **{f"{name}?": _OPTIONAL for name in _NUMBERS},
}
_REPORT = {
    "format": frozenset({1}),
    "kind": frozenset({"attention", "generate", "model"}),
    **dict.fromkeys(("date?", "command?", "commit?"), (str, None)),
    "hardware": {
        **dict.fromkeys(("device", "cpu", "gpu?"), str),
        "cores": (COUNT, None),
        "threads": COUNT,
        **dict.fromkeys(("load_before?", "load_after?"), _OPTIONAL),
    },
    "versions": {"torch": str},
    "settings": {"dtype?": str, "causal?": bool, "layers?": (COUNT, None)},
    "rows": [_ROW],
}


def check_report(content: Any, path: Path) -> dict[str, Any]:
    """Check the content of a report and fill in the optional fields of its rows.

    A `RunError` of one line names what is wrong with the file.
    """
    check(content, _REPORT, path)
    for i, row in enumerate(content["rows"]):
        if row["status"] == OK and row.get("recompilations") is None:
            check(row, {"seconds": Number(above=0)}, path, f"rows[{i}]")
    return {**content, "rows": [{"label": row["name"], "note": "", **row} for row in content["rows"]]}


def format_report(report: dict[str, Any]) -> str:
    """Return the report as text, one line per row. The last column says why numbers are missing."""

    def show(value: float | None, scale: float) -> str:
        if value is None:
            return ""
        return f"{scale * value:,.0f}" if scale * value >= 1000 else f"{scale * value:.4g}"

    names = ("model", "name", *SIZES)
    table = [["", "", *SIZES, *(heading for heading, _ in _NUMBERS.values()), ""]]
    for row in report["rows"]:
        cells = [str(row.get(name, "")) for name in names]
        cells += [show(row.get(name), scale) for name, (_, scale) in _NUMBERS.items()]
        problems = (row["status"], row.get("note"))
        table.append([*cells, ", ".join(text for text in problems if text not in (OK, "", None))])
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    return f"{title(report)}\n\n" + "\n".join("  ".join(line) for line in zip(*padded, strict=True))


def title(report: dict[str, Any]) -> str:
    settings, subject = report["settings"], "Training steps of whole models"
    if report["kind"] == "generate":
        model = f" of a language model of {settings['layers']} layers" if settings.get("layers") else ""
        subject = f"One more token{model} after N tokens"
    elif report["kind"] == "attention":
        passes = "forward" if settings.get("inference") else "forward + backward"
        subject = f"One {'causal ' if settings.get('causal') else ''}attention layer, {passes}"
    torch_version = report["versions"]["torch"].split("+")[0]
    parts = (device_name(report["hardware"]), settings.get("dtype"), f"torch {torch_version}")
    return f"{subject}\n{', '.join(part for part in parts if part)}"


# Figures


@contextlib.contextmanager
def new_figure(file: Path, rows: int, columns: int, height: float = 4.0) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, then write FILE.png and FILE.svg; raise ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same numbers give the same bytes, and names with dollar signs are no formulas.
    with matplotlib.rc_context({"svg.hashsalt": "primal", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(4.4 * columns + 3.0, height * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, axes
        for axis in axes.flat:
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        for kind, metadata in (("png", None), ("svg", {"Date": None})):
            path = file.with_name(f"{file.name}.{kind}")
            write_atomically(path, partial(figure.savefig, format=kind, dpi=150, metadata=metadata))


_MEMORY = {
    "state_bytes": "state per sequence",
    "peak_bytes": "peak memory of a step",
    "saved_bytes": "memory saved for backward",
}


def plot_report(report: dict[str, Any], file: Path) -> list[Path]:
    """Plot time and memory against length, a row of panels per width and batch of generation; return the files."""
    rows: Sequence[Row] = [row for row in report["rows"] if row["status"] == OK]
    if not rows or report["kind"] == "model":  # training steps have no lengths
        return []
    memory = next((name for name in _MEMORY if any(row.get(name) for row in rows)), "saved_bytes")
    is_generation = report["kind"] == "generate"

    def panel(row: Row) -> str:
        batch = f", batch {row['batch']}" if is_generation else ""  # that of a layer depends on the length
        return f"d {row['embed_dim']}, {row['num_heads']} heads{batch}"

    def seconds(row: Row) -> float:
        return float(row["seconds"]) / (1 if is_generation else row["batch"] * row["length"])

    panels = list(dict.fromkeys(map(panel, rows)))
    with new_figure(file, len(panels), 2) as (figure, grid):
        for (left, right), name in zip(grid, panels, strict=True):
            own = [row for row in rows if panel(row) == name]
            draw_lengths(left, own, seconds, f"time per {'step' if is_generation else 'token'}", "s")
            draw_lengths(right, own, lambda row: row.get(memory), _MEMORY[memory], "B")
            left.set_title(name, loc="left")
            right.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        figure.suptitle(title(report))
    return [file.with_name(f"{file.name}.{kind}") for kind in ("png", "svg")]


def draw_lengths(axis: Any, rows: Sequence[Row], value: Callable[[Row], float | None], label: str, unit: str) -> None:
    """Draw one line per name against the sequence length, both axes logarithmic."""
    from matplotlib.ticker import EngFormatter

    for name in dict.fromkeys(row["name"] for row in rows):
        points = sorted((row["length"], value(row) or math.nan) for row in rows if row["name"] == name)
        axis.loglog(*zip(*points, strict=True), "o-", label=name)
    ticks = sorted({row["length"] for row in rows})
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(EngFormatter(unit))
    axis.set(xlabel="sequence length (tokens)", ylabel=label)
