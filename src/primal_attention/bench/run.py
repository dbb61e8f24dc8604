"""`primal bench attention`: the gate, then memory and time of every contender at every size, one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primal_attention.bench import memory, timing
from primal_attention.bench.contenders import CannotRunError, Contender, contenders, plain_reason
from primal_attention.bench.gate import Gate
from primal_attention.bench.settings import Case, Settings
from primal_attention.bench.step import Step
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import collect, load

OK, OOM, REFUSED, UNSUPPORTED, SKIPPED, FAILED = (
    "ok",
    "out of memory",
    "refused",
    "unsupported",
    "skipped",
    "failed",
)


@dataclass(frozen=True)
class Timed:
    """One contender at one size, and the seconds of a step."""

    name: str
    label: str
    kind: str
    embed_dim: int
    num_heads: int
    batch: int
    length: int
    status: str
    note: str = ""
    seconds: float | None = None
    iqr: float | None = None
    runs: int | None = None
    method: str | None = None


@dataclass(frozen=True)
class Row(Timed):
    """Ratios are SDPA's time over this one's, and this one's bytes over SDPA's."""

    peak_bytes: int | None = None
    resident_bytes: int | None = None
    kept_bytes: int | None = None
    speedup: float | None = None
    peak_ratio: float | None = None
    kept_ratio: float | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        return self.embed_dim, self.num_heads, self.length


def run(settings: Settings, everybody: Sequence[Contender] | None = None) -> dict[str, Any]:
    """Measure, and return the report that also stands in OUT/NAME.json: it is written as the run goes on."""
    settings.check()
    field = contenders(baselines=settings.baselines, only=settings.only) if everybody is None else everybody
    grid = settings.cases()
    report: dict[str, Any] = {
        "format": 1,
        "kind": "attention",
        **collect(command=settings.command, device=settings.on, commit=settings.commit),
        "settings": plain(settings),
        "gate": [],
        "rows": [],
    }
    rows: list[Row] = []
    with Progress(len(field) * sum(map(len, grid)), "timing") as progress:
        for cases in grid:
            if any(c.name == "primal-compiled" for c in field):
                torch.compiler.reset()  # a compiled function keeps a bounded number of graphs, then quietly gives up
            verdicts, barred = weed_out(field, cases[0], settings.seed + 1)
            report["gate"] += verdicts
            for case in cases:
                # All of them at one length, then the next: what is compared is measured close together.
                for contender in field:
                    reason = barred.get(contender.name) or too_slow(contender, case, rows, settings.limit)
                    row = blank(contender, case, *reason) if reason else measure(contender, case, settings)
                    rows.append(row)
                    progress.advance(f"{contender.label}, d {case.embed_dim}, N {case.length}: {brief(row)}")
                report["rows"] = [dataclasses.asdict(row) for row in with_ratios(rows)]
                write_json(settings.out / f"{settings.file_name}.json", report)
    report["hardware"]["load_after"] = load()
    write_json(settings.out / f"{settings.file_name}.json", report)
    return report


def weed_out(
    field: Sequence[Contender], case: Case, seed: int
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The gate's verdicts at this width, and who may not be timed: name → (status, note)."""
    verdicts: list[dict[str, Any]] = []
    barred: dict[str, tuple[str, str]] = {}
    gated = [contender for contender in field if contender.gated]
    gate = Gate(case, seed) if gated else None
    for contender in gated:
        assert gate is not None
        try:
            with memory.refusing_too_much(case.device):
                verdict = gate.judge(contender.build)
        except Exception as error:  # the contender's own reason, whatever it is, becomes a line of the table
            barred[contender.name] = why(error)
            continue
        if not verdict.passed:
            barred[contender.name] = (REFUSED, str(verdict))
        width = {"embed_dim": case.embed_dim, "num_heads": case.num_heads}
        verdicts.append({"name": contender.name, **width, **verdict.plain()})
    del gate  # its tensors must not count as anybody's memory
    memory.free(case.device)
    return verdicts, barred


def measure(contender: Contender, case: Case, settings: Settings) -> Row:
    """Memory, then time: a graph's pool must not be alive while memory is counted."""
    try:
        with memory.refusing_too_much(case.device):
            torch.manual_seed(settings.seed)
            step = Step.of(contender.build(case), case, settings.seed)
            space = memory.measure(step, case.device)
            time = timing.measure(
                step, case.device, eager=settings.eager, repeats=settings.repeats, seconds=settings.seconds
            )
    except Exception as error:  # one contender's trouble at one size is a line of the table, not the run's end
        row = blank(contender, case, *why(error))
    else:
        row = dataclasses.replace(
            blank(contender, case, OK, time.note),
            seconds=time.median,
            iqr=time.iqr,
            runs=time.runs,
            method=time.method,
            peak_bytes=space.peak,
            resident_bytes=space.resident,
            kept_bytes=space.kept,
        )
    step = None  # type: ignore[assignment]  # nor this one's as the next one's
    memory.free(case.device)
    return row


def why(error: Exception) -> tuple[str, str]:
    """Status and note of a row that an error ended."""
    if memory.is_out_of_memory(error):
        return OOM, "does not fit into the memory"
    line = plain_reason(" ".join((str(error).strip().splitlines() or [""])[0].split()))[:200]
    if isinstance(error, (CannotRunError, ValueError, NotImplementedError, ImportError)):
        return UNSUPPORTED, line
    return FAILED, f"{type(error).__name__}: {line}"


def too_slow(contender: Contender, case: Case, rows: Sequence[Row], limit: float) -> tuple[str, str] | None:
    """A contender past the limit at a shorter length is not tried at longer ones."""
    for row in rows:
        if row.name == contender.name and row.size[:2] == (case.embed_dim, case.num_heads) and row.length < case.length:
            if row.seconds is not None and row.seconds > limit:
                return SKIPPED, f"took {row.seconds:.1f} s at {row.length:,} tokens already (--limit {limit:g})"
            if row.status == OOM and row.batch == case.batch:
                return OOM, f"did not fit at {row.length:,} tokens already"
    return None


def blank(contender: Contender, case: Case, status: str, note: str = "") -> Row:
    who, shape = (contender.name, contender.label, contender.kind), (case.embed_dim, case.num_heads, case.batch)
    return Row(*who, *shape, case.length, status, note)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    base = {row.size: row for row in rows if row.name == "sdpa" and row.status == OK}
    result = []
    for row in rows:
        sdpa = base.get(row.size)
        if sdpa is not None and row.status == OK:
            row = dataclasses.replace(
                row,
                speedup=ratio(sdpa.seconds, row.seconds),
                peak_ratio=ratio(row.peak_bytes, sdpa.peak_bytes),
                kept_ratio=ratio(row.kept_bytes, sdpa.kept_bytes),
            )
        result.append(row)
    return result


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def brief(row: Row) -> str:
    return row.status if row.seconds is None else f"{1e3 * row.seconds:.3g} ms"


def plain(settings: Any) -> dict[str, Any]:
    """Settings as JSON has them, with what was left to the device filled in."""
    values = dataclasses.asdict(settings)
    values["out"] = str(values["out"])
    values["device"] = str(settings.on)
    values["dtype"] = str(settings.torch_dtype).removeprefix("torch.")
    return values
