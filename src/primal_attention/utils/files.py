"""Atomic writers, and guarded readers for the text, JSON, YAML and CSV files that a user passes in.

A file is written under a temporary name in the same folder, flushed to disk, then renamed. A file that cannot be read
is a `FileError`: one line with the path, the field where there is one, and what was expected. `check` compares plain
content with a schema written in plain Python:

    str, bool, dict, list, None, Number()    a value of that type
    frozenset({"a", "b"})                    one of these values
    (s, t)                                   one of several schemas
    [s]                                      a list of s
    {"a": s, "b?": t}                        a mapping with "a" and maybe "b"; other keys are ignored
    {...: s}                                 a mapping from any name to s
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from primal_attention.utils.errors import FileError, WriteError

Schema = Any
MAX_BYTES = 256 * 1024**2
MAX_DEPTH = 64
MAX_INTEGER = 2**63
NAMES: dict[Any, str] = {str: "a text", bool: "true or false", dict: "a mapping", list: "a list", None: "null"}


def partial_name(path: Path) -> Path:
    """Return the temporary name of a file that this process writes."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, keep: Path | None = None) -> None:
    """Call `write` on a temporary file next to `path` and rename it; the old file stays if anything fails.

    Args:
        path: The file; its folder is created if needed.
        write: Writes the content to an open file.
        keep: New name of the old file, which is replaced otherwise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_name(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_error(path: Path, error: Exception) -> WriteError:
    """Return the error for a file that cannot be written, with the reason that the system gave."""
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or ["?"])[0]
    state = "the previous version is unchanged" if path.exists() else "nothing was written"
    return WriteError(f"cannot write {path} ({reason}): {state}")


def sync_folder(folder: Path) -> None:
    """Flush renames in a folder to disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    # Arguments may hold bytes that are not UTF-8. They are written as escapes, which JSON and YAML read back.
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with all their columns in order of first appearance; a missing value is an empty cell."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors as safetensors."""
    from safetensors.torch import save

    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    write_atomically(path, lambda file: file.write(data))


@dataclass(frozen=True)
class Number:
    """Schema of a number, within bounds where they are set; NaN and infinity only with `finite` off."""

    integer: bool = False
    above: float = -math.inf
    least: float = -math.inf
    finite: bool = True

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        if not math.isfinite(value):
            return not self.finite
        return self.above < value and self.least <= value

    def __str__(self) -> str:
        bounds = {"above": self.above, "of at least": self.least}
        text = "".join(f" {word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
        return f"{'a whole number' if self.integer else 'a number'}{text}"


COUNT = Number(integer=True, least=1)


def read_text(path: Path, *, pipes: bool = False) -> str:
    """Return the content of a UTF-8 file: a regular one, or also a pipe."""
    try:
        size = path.stat().st_size
        if not path.is_file() and not (pipes and path.is_fifo()):
            raise FileError(f"{path} is {'a folder where a file is needed' if path.is_dir() else 'not a regular file'}")
        if size > MAX_BYTES:
            raise FileError(f"{path} is too large to be read ({size:,} bytes, at most {MAX_BYTES:,})")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise FileError(f"{path} {reason}") from None


def read_json(path: Path, schema: Schema = ...) -> Any:
    """Return the plain values of a JSON file that matches the schema."""
    return _read_plain(path, "JSON", json.loads, schema)


def read_yaml(path: Path, schema: Schema = ...) -> Any:
    """Return the plain values of a YAML file that matches the schema; tags that build objects are refused."""
    import yaml

    def parse(text: str) -> Any:
        depth = 0
        for token in yaml.scan(text, yaml.SafeLoader):
            if isinstance(token, yaml.AliasToken):
                raise yaml.YAMLError("it has an alias")  # with which a small file can expand without limit
            depth += isinstance(token, yaml.FlowSequenceStartToken) - isinstance(token, yaml.FlowSequenceEndToken)
            if depth > MAX_DEPTH:  # PyYAML takes quadratic time for nested brackets
                raise RecursionError
        return yaml.safe_load(text)

    return _read_plain(path, "YAML", parse, schema)


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a CSV file, all of the same length."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header, *rows = list(reader) or [[]]
    except csv.Error as error:
        raise FileError(f"{path} line {reader.line_num} is not CSV ({error})") from None
    if not any(header):
        raise FileError(f"{path} is empty: it needs a header line")
    if len(set(header)) < len(header):
        raise FileError(f"{path}: two columns have the same name")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise FileError(f"{path} line {number} has {len(row)} cells, the header {len(header)}")
    return header, rows


def read_cell(cell: str, where: str) -> float | None:
    """Return a number, NaN and infinity by name included, or None for an empty cell."""
    try:
        value = float(cell) if cell else None
    except ValueError:
        raise FileError(f"{where} must be a number (got {cell[:40]!a})") from None
    if value is not None and math.isinf(value) and "inf" not in cell.lower():
        raise FileError(f"{where} is too large ({cell[:12]}…)")
    return value


def check(content: Any, schema: Schema, path: Path, field: str = "") -> None:
    """Raise a `FileError` that names the path and the field where the content does not match the schema."""
    options = schema if isinstance(schema, tuple) else (schema,)
    # Mappings and lists are compared item by item with the option of their type.
    nested = next((s for s in options if isinstance(s, (dict, list)) and isinstance(content, type(s))), None)
    if isinstance(nested, list):
        for i, item in enumerate(content):
            check(item, nested[0], path, f"{field}[{i}]")
    elif isinstance(nested, dict):
        for key, inner in nested.items():
            for name in content if key is ... else [key.removesuffix("?")]:
                place = f"{field}.{name}" if field else name
                if name in content:
                    check(content[name], inner, path, place)
                elif not key.endswith("?"):
                    raise FileError(f"{path}: {place} is missing")
    elif not any(_matches(content, option) for option in options):
        raise _mismatch(content, " or ".join(map(_describe, options)), path, field)


def _read_plain(path: Path, language: str, parse: Callable[[str], Any], schema: Schema) -> Any:
    text = read_text(path)
    try:
        content = parse(text)
    except Exception as error:  # PyYAML has errors of its own, and dates that do not exist are ValueErrors
        is_deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if is_deep else _shorten(" ".join(str(error).split()), 200, quote=False)
        raise FileError(f"{path} is not {language} ({reason})") from None
    _check_plain(content, path, "", 0)
    check(content, schema, path)
    return content


def _check_plain(value: Any, path: Path, field: str, depth: int) -> None:
    """Refuse other types than those of JSON, huge integers, deep nesting and invalid characters."""
    if depth > MAX_DEPTH:
        raise FileError(f"{path} is nested too deeply")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise FileError(f"{path}: every key must be a text (got {_shorten(key)})")
            _check_plain(key, path, "a key", depth)
            _check_plain(inner, path, f"{field}.{key}" if field else key, depth + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_plain(inner, path, f"{field}[{i}]", depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise _mismatch(value, "plain data", path, field)
    elif isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise _mismatch(value, "a number of at most 64 bits", path, field)
    # U+DC80 to U+DCFF stand for bytes of an argument that are not UTF-8. Other surrogates are damage.
    elif isinstance(value, str) and re.search("[\ud800-\udc7f\udd00-\udfff]", value):
        raise _mismatch(value, "a text of whole characters", path, field)


def _matches(content: Any, schema: Schema) -> bool:
    if isinstance(schema, Number):
        return schema.accepts(content)
    if isinstance(schema, frozenset):
        return isinstance(content, (str, int)) and content in schema
    if isinstance(schema, (dict, list)):
        return False  # of another type than the content
    return schema is ... or (content is None if schema is None else isinstance(content, schema))


def _describe(schema: Schema) -> str:
    if isinstance(schema, (frozenset, Number)):
        return str(schema) if isinstance(schema, Number) else " or ".join(sorted(map(str, schema)))
    return NAMES[type(schema) if isinstance(schema, (dict, list)) else schema]


def _mismatch(content: Any, expected: str, path: Path, field: str) -> FileError:
    name = _shorten(field, quote=False) or "the content"
    return FileError(f"{path}: {name} must be {expected} (got {_shorten(content)})")


def _shorten(value: Any, limit: int = 60, quote: bool = True) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)
    text = text if quote else text[1:-1]
    return text if len(text) <= limit else text[:limit] + "…"
