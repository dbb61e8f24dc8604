"""What all benchmarks share: timing, memory, the JSON report, its table and its plot."""

from __future__ import annotations

import gc
import itertools
import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primal_attention.utils.files import COUNT, Number, check, read_json, write_atomically, write_json
from primal_attention.utils.provenance import collect, device_name, load

GRAPH, EVENTS, HOST = "CUDA graph", "CUDA events, eager", "torch.utils.benchmark"
OK, OUT_OF_MEMORY, REFUSED, UNSUPPORTED, SKIPPED, FAILED = STATUSES = (
    "ok", "out of memory", "refused", "unsupported", "skipped", "failed",
)  # fmt: skip
Row = dict[str, Any]


class UnsupportedError(Exception):
    """This machine or the requested mode rules an implementation out; the message says why."""


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


def _time_on_gpu(step: Callable[[], object], eager: bool, repeats: int) -> Row:
    # Capture needs a side stream, and everything that is initialised on first use must be initialised before it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if eager:
        return _time_between_events(step, repeats, EVENTS)
    step()  # a layer may hold tensors of the side stream's last step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: the backward pass runs in a thread of autograd, which may allocate.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # for example a step that synchronises with the host
        del graph
        gc.collect()
        torch.cuda.synchronize()
        # A failed capture leaves the random generator in capture mode; a successful one resets it.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda").add_(1)
        reason = first_line(error.__context__ or error)  # the cause, not the error that ended the capture
        return _time_between_events(step, repeats, EVENTS, note=f"no CUDA graph: {reason}")
    graph.replay()
    return _time_between_events(graph.replay, repeats, GRAPH)


def _time_between_events(work: Callable[[], object], repeats: int, method: str, note: str = "") -> Row:
    """Run back to back without synchronisation, so that a slow host shows."""
    work()
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
    """Release what earlier measurements left, so that it does not count as the next one's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:  # one per stream, and every graph capture has its own stream
            clear()
        torch.cuda.empty_cache()


def peak_bytes(step: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the peak of allocated bytes during an eager step on a GPU, and the bytes allocated before it."""
    free_memory(device)
    step()  # libraries allocate their workspaces again
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), before


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def first_line(error: BaseException) -> str:
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())


def plain_reason(message: str) -> str:
    """Return why a backend cannot serve a call, without the advice around it."""
    return re.sub(r"^backend='\w+' cannot serve this call: | \(backend='auto' falls back by itself\)$", "", message)


def failure(error: Exception) -> tuple[str, str]:
    """Return the status and the note of a row that an error ended."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, "does not fit into the memory"
    line = plain_reason(first_line(error))[:200]
    if line.startswith(("No available kernel", "No viable backend")):
        return UNSUPPORTED, "torch has no such kernel for this device, dtype and head width"
    if isinstance(error, (UnsupportedError, ValueError, NotImplementedError, ImportError)):
        return UNSUPPORTED, line
    return FAILED, f"{type(error).__name__}: {line}"


# The report: provenance, settings and rows


def provenance(device: torch.device, command: str | None, commit: str | None) -> dict[str, Any]:
    """Return command, commit, date, versions and hardware."""
    return collect(command=command, device=device, commit=commit)


def start_report(kind: str, args: Namespace) -> dict[str, Any]:
    """Return a report without rows: provenance and the flags."""
    values = {name: value for name, value in vars(args).items() if name not in ("command", "commit", "file")}
    plain = {name: str(v) if isinstance(v, (Path, torch.device)) else v for name, v in values.items()}
    return {
        "format": 1,
        "kind": kind,
        **provenance(args.device, args.command, args.commit),
        "settings": plain,
        "rows": [],
    }


def write_report(file: Path, report: dict[str, Any]) -> None:
    report["hardware"]["load_after"] = load()
    write_json(file, report)


# Numbers of a row: heading and scale in the table.
_LAYER_NUMBERS = {
    "seconds": ("ms", 1e3),
    "iqr": ("IQR ms", 1e3),
    "speedup": ("speed ÷ SDPA's", 1),
    "peak_bytes": ("peak MiB", 2**-20),
    "peak_ratio": ("÷ SDPA's", 1),
    "kept_bytes": ("saved MiB", 2**-20),
    "kept_ratio": ("÷ SDPA's", 1),
    "state_bytes": ("state kB", 1e-3),
}
_MODEL_NUMBERS = {
    "wall_ms": ("ms per step", 1),
    "ratio": ("÷ SDPA's", 1),
    "busy_ms": ("GPU busy ms", 1),
    "first_s": ("first step s", 1),
    "peak_mib": ("peak MiB", 1),
    "peak_ratio": ("÷ SDPA's", 1),
    "recompilations": ("recompilations", 1),
}
_OPTIONAL = (Number(least=0), None)
_LAYER_ROW = {
    **dict.fromkeys(("name", "label"), str),
    **dict.fromkeys(("embed_dim", "num_heads", "batch", "length"), COUNT),
    "status": frozenset(STATUSES),
    "note?": str,
    **{f"{name}?": _OPTIONAL for name in _LAYER_NUMBERS},
}
_MODEL_ROW = {"name": str, "kind": str, "error": (str, None), **{f"{name}?": _OPTIONAL for name in _MODEL_NUMBERS}}
_REPORT = {
    "format": frozenset({1}),
    "kind": frozenset({"attention", "decode", "model"}),
    **dict.fromkeys(("date?", "command?", "commit?"), (str, None)),
    "hardware": {
        **dict.fromkeys(("device", "cpu", "gpu?"), str),
        "cores": (COUNT, None),
        "threads": COUNT,
        **dict.fromkeys(("load_before?", "load_after?"), _OPTIONAL),
    },
    "versions": {"torch": str},
    "settings": {"dtype?": str, "causal?": bool, "layers?": (COUNT, None)},
}


def read_report(path: Path) -> dict[str, Any]:
    """Read a report; a `RunError` of one line names what is wrong with the file."""
    return check_report(read_json(path), path)


def check_report(content: Any, path: Path) -> dict[str, Any]:
    """Check the content of a report and fill in the optional fields of its rows."""
    check(content, _REPORT, path)
    schema = _MODEL_ROW if content["kind"] == "model" else _LAYER_ROW
    check(content, {"rows": [schema]}, path)
    defaults = dict.fromkeys(name.removesuffix("?") for name in schema) | {"note": "", "iqr": 0.0}
    rows = [{**defaults, **row} for row in content["rows"]]
    required = ("seconds", "state_bytes") if content["kind"] == "decode" else ("seconds",)
    for i, row in enumerate(rows):
        if row.get("status") == OK:
            check(row, dict.fromkeys(required, Number(above=0)), path, f"rows[{i}]")
    return {**content, "rows": rows}


def format_report(report: dict[str, Any]) -> str:
    """Return the report as text, one line per row. The last column says why numbers are missing."""
    is_model = report["kind"] == "model"
    numbers = _MODEL_NUMBERS if is_model else _LAYER_NUMBERS
    names = ("name", "kind") if is_model else ("label", "embed_dim", "num_heads", "batch", "length")
    table = [["", *names[1:], *(heading for heading, _ in numbers.values()), ""]]
    for row in report["rows"]:
        note = row["error"] if is_model else ", ".join(text for text in (row["status"], row["note"]) if text)
        cells = [str(row[name]) for name in names]
        cells += [show_number(row.get(name), scale) for name, (_, scale) in numbers.items()]
        table.append([*cells, "" if note in (OK, None) else note])
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for line in zip(*columns, strict=True):
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return "\n\n".join(part for part in (title(report), "\n".join(lines), busy(report["hardware"])) if part)


def show_number(value: float | None, scale: float) -> str:
    if value is None:
        return ""
    return f"{scale * value:,.0f}" if scale * value >= 1000 else f"{scale * value:.4g}"


def title(report: dict[str, Any]) -> str:
    settings, subject = report["settings"], "Training steps of whole models"
    if report["kind"] == "decode":
        model = f" of a language model of {settings['layers']} layers" if settings.get("layers") else ""
        subject = f"One more token{model} after N tokens"
    elif report["kind"] == "attention":
        passes = "forward" if settings.get("inference") else "forward + backward"
        subject = f"One {'causal ' if settings.get('causal') else ''}attention layer, {passes}"
        tokens = {row["batch"] * row["length"] for row in report["rows"]}
        subject += f", {tokens.pop():,} tokens per step" if len(tokens) == 1 else ""
    torch_version = report["versions"]["torch"].split("+")[0]
    parts = (device_name(report["hardware"]), settings.get("dtype"), f"torch {torch_version}")
    return f"{subject}\n{', '.join(part for part in parts if part)}"


def busy(hardware: dict[str, Any]) -> str:
    """Return a warning if other programs used the cores of a CPU benchmark."""
    before, after = hardware.get("load_before") or 0.0, hardware.get("load_after") or 0.0
    cores, threads = hardware["cores"] or 1, hardware["threads"]
    if hardware["device"] != "cpu" or (before < 0.5 * cores and after < threads + 0.5):
        return ""
    return f"the machine was busy (load {before:g} before, {after:g} after, {cores} cores): times are too long"


def show_length(n: int) -> str:
    for unit, letter in ((1024**2, "M"), (1024, "K")):
        if n % unit == 0:
            return f"{n // unit}{letter}"
    return str(n)


_STYLES: dict[str, dict[str, Any]] = {
    "primal-fused": {"color": "#c2410c", "marker": "o", "linewidth": 2.4, "zorder": 5},
    "primal-cpu": {"color": "#ea7a1f", "marker": "o", "linewidth": 2.0, "zorder": 4},
    "primal-compiled": {"color": "#eab308", "marker": "s", "linewidth": 1.4},
    "primal-reference": {"color": "#a8896c", "marker": "s", "linewidth": 1.4, "linestyle": "--"},
    "published": {"color": "#44403c", "marker": "D", "linewidth": 1.4, "linestyle": ":"},
    "sdpa": {"color": "#1d4ed8", "marker": "^", "linewidth": 2.4, "zorder": 4},
}


def plot_report(report: dict[str, Any], file: Path) -> list[Path]:
    """Plot time and memory against length as FILE.png and FILE.svg; raise ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator

    rows = [row for row in report["rows"] if row.get("status") == OK]
    if not rows:  # or training steps, which have no lengths
        return []
    if report["kind"] == "decode":
        time, memory, length = "time per token (µs)", "state per sequence (kB)", "tokens before"
        values = {time: lambda row: 1e6 * row["seconds"], memory: lambda row: row["state_bytes"] / 1e3}
    else:
        has_peak = any(row.get("peak_bytes") for row in rows)
        time, length = "time per token (ns)", "sequence length (tokens)"
        memory = "peak memory of a step (MiB)" if has_peak else "memory saved for backward (MiB)"
        field = "peak_bytes" if has_peak else "kept_bytes"
        values = {
            time: lambda row: 1e9 * row["seconds"] / (row["batch"] * row["length"]),
            memory: lambda row: (row.get(field) or 0) / 2**20,
        }
    widths = list(dict.fromkeys((row["embed_dim"], row["num_heads"]) for row in rows))
    with plt.rc_context({"svg.hashsalt": "primal", "svg.fonttype": "none", "text.parse_math": False}):
        size = (12.4, 3.7 * len(widths) + 0.5)
        figure, grid = plt.subplots(len(widths), 2, figsize=size, squeeze=False, layout="constrained")
        for axes, (width, heads) in zip(grid, widths, strict=True):
            own = [row for row in rows if (row["embed_dim"], row["num_heads"]) == (width, heads)]
            ticks = sorted({row["length"] for row in own})
            for axis, (label, value) in zip(axes, values.items(), strict=True):
                for name in dict.fromkeys(row["name"] for row in report["rows"]):
                    line = sorted((r for r in own if r["name"] == name and value(r)), key=lambda r: r["length"])
                    style = _STYLES.get(name, {"marker": ".", "linewidth": 1.1})
                    legend = line[0]["label"] if line else "_"
                    axis.plot([r["length"] for r in line], [value(r) for r in line], label=legend, **style)
                axis.set(xscale="log", yscale="log", xlabel=length, ylabel=label)
                axis.set_title(f"d {width}, {heads} heads", fontsize=10, loc="left")
                axis.set_xticks(ticks, [show_length(n) for n in ticks])
                axis.minorticks_off()
                axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
                axis.grid(alpha=0.25)
                axis.spines[["top", "right"]].set_visible(False)
        lines = {h.get_label(): h for axis in grid.flat for h in axis.get_lines() if h.get_label()[0] != "_"}
        figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False, fontsize=9)
        figure.suptitle(title(report), fontsize=11)
        files = {"png": file.with_name(f"{file.name}.png"), "svg": file.with_name(f"{file.name}.svg")}
        for kind, path in files.items():
            metadata = {"Date": None} if kind == "svg" else None  # the same report gives the same bytes
            write = partial(figure.savefig, format=kind, dpi=160, metadata=metadata)
            write_atomically(path, write)
        plt.close(figure)
    return list(files.values())
