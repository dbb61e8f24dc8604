"""Offline reinforcement learning: trajectories from D4RL's HDF5 files, from Minari, or from `.npz` with the same keys.

    data = load("hopper-medium", "data/d4rl")      # data/d4rl/hopper-medium.hdf5, or hopper_medium-v2.hdf5, or .npz
    data = read_minari("mujoco/hopper/medium-v0")  # a Minari data set on this machine
    data.returns_to_go, data.timesteps             # per row: the conditions of Decision Transformer
    normalized_score("hopper", 2174.0)             # 0 is D4RL's random policy, 100 its expert

Row t is one transition, episodes follow one another, and an episode ends where `terminals` or `timeouts` is true. Rows
after the last end belong to an unfinished episode whose return is unknown; they are left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data import storage
from primal_attention.utils.errors import DataError, import_package

# Mean returns of D4RL's random and expert policies, which normalise its scores.
REFERENCE = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
}
LEVELS = ("medium-expert", "medium", "medium-replay")
SETS = tuple(f"{env}-{level}" for level in LEVELS for env in REFERENCE)
HORIZON = 1000  # steps after which these environments stop an episode
ORIGINAL = "D4RL's layout"  # source of trajectories that name no other
KEYS = ("observations", "actions", "rewards", "terminals")
MAX_COMPRESSION = 1100  # above the ratio of deflate: a larger column cannot be in the file


def environment_of(name: str) -> str:
    """Return the environment of a set's name: hopper for hopper-medium-replay."""
    env = name.partition("-")[0].partition("_")[0].lower()
    if env not in REFERENCE:
        raise DataError(f"set {name!r} names no environment with reference scores (has {', '.join(REFERENCE)})")
    return env


def normalized_score(env: str, mean_return: float) -> float:
    """Return D4RL's score: 0 for the return of a random policy, 100 for an expert's."""
    low, high = REFERENCE[environment_of(env)]
    return 100.0 * (mean_return - low) / (high - low)


@dataclass(frozen=True)
class Trajectories:
    """Complete episodes, one after the other. `starts` has each episode's first row, `source` the data's origin."""

    name: str
    observations: np.ndarray  # (T, state_dim) float32
    actions: np.ndarray  # (T, action_dim) float32
    rewards: np.ndarray  # (T,) float32
    starts: np.ndarray  # (E,) int64
    source: str = ORIGINAL

    def __len__(self) -> int:
        return len(self.rewards)

    @cached_property
    def ends(self) -> np.ndarray:
        """One past each episode's last row, (E,)."""
        return np.append(self.starts[1:], len(self))

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts

    @cached_property
    def returns_to_go(self) -> np.ndarray:
        """Sum of the rewards from each row to its episode's end, (T,) float32."""
        sums = np.empty(len(self), np.float64)
        for start, end in zip(self.starts, self.ends, strict=True):
            sums[start:end] = np.cumsum(self.rewards[start:end][::-1], dtype=np.float64)[::-1]
        return sums.astype(np.float32)

    @cached_property
    def returns(self) -> np.ndarray:
        """Each episode's return, (E,)."""
        return self.returns_to_go[self.starts]

    @cached_property
    def timesteps(self) -> np.ndarray:
        """Each row's position in its episode, (T,) int64."""
        return np.arange(len(self)) - np.repeat(self.starts, self.lengths)

    def state_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the deviation of the states over all rows, for their normalisation."""
        states = self.observations.astype(np.float64)
        return states.mean(axis=0).astype(np.float32), states.std(axis=0).astype(np.float32)


def find(name: str, folder: str | Path | None = None) -> Path | None:
    """Return the file of a set, under its own name or under D4RL's."""
    folder = Path(folder or storage.default_folder("d4rl"))
    env, _, level = name.partition("-")
    stems = (name, f"{name}-v2", f"{env}_{level.replace('-', '_')}-v2")
    files = (folder / f"{stem}{end}" for stem in stems for end in (".hdf5", ".npz"))
    return next((file for file in files if file.is_file()), None)


def load(name: str, folder: str | Path | None = None) -> Trajectories:
    """Read a set from the folder."""
    folder = Path(folder or storage.default_folder("d4rl"))
    file = find(name, folder)
    if file is None:
        near = difflib.get_close_matches(name, SETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near and near[0] != name else ""
        raise DataError(
            f"{name}.hdf5 is not in {folder}{hint}: put the file in D4RL's layout there, or name "
            "another folder with --data.folder, or a Minari set with --data.minari"
        )
    return read_npz(file, name) if file.suffix == ".npz" else read_hdf5(file, name)


def read_hdf5(file: str | Path, name: str | None = None) -> Trajectories:
    """Read the trajectories of an HDF5 file in D4RL's layout; keys that are not needed are not read."""
    h5py = import_package("h5py", f"reading {file}")
    file = Path(file)
    source = ORIGINAL
    with storage.reading(file, "an HDF5 file, or truncated"), h5py.File(file) as content:
        columns = {}
        for key in (*KEYS, "timeouts"):
            column = content.get(key)
            if isinstance(column, h5py.Dataset):
                if column.nbytes > MAX_COMPRESSION * file.stat().st_size:
                    raise DataError(f"{file}: {key} claims {column.nbytes} bytes, more than the file can hold")
                columns[key] = column[()]
        if {"report", "level"} <= set(content.attrs):
            env = content.attrs.get("env", "unknown environment")
            source = f"collected anew in {ORIGINAL} ({content.attrs['level']}, {env})"
    return from_columns(name or file.stem, columns, where=str(file), source=source)


def read_npz(file: str | Path, name: str | None = None) -> Trajectories:
    """Read the trajectories of a `.npz` with the keys of D4RL's layout; needs numpy alone."""
    file = Path(file)
    columns = storage.read_npz(file, "a .npz of plain arrays", (), (*KEYS, "timeouts", "source"))
    source = str(columns["source"])[:200] if "source" in columns else ORIGINAL
    return from_columns(name or file.stem, columns, where=str(file), source=source)


def read_minari(identifier: str, name: str | None = None) -> Trajectories:
    """Read the trajectories of a Minari data set that is on this machine, by its identifier."""
    minari = import_package("minari", "reading Minari data sets")
    where = f"Minari set {identifier!r}"
    try:
        episodes = list(minari.load_dataset(identifier).iterate_episodes())
    except Exception as error:  # a missing set, or whatever h5py raises for a damaged one
        reason = storage.one_line(error)
        raise DataError(f"{where} cannot be read ({reason}): minari download {identifier}") from error
    if not episodes:
        raise DataError(f"{where} has no episodes")
    if not isinstance(episodes[0].observations, np.ndarray):
        got = type(episodes[0].observations).__name__
        raise DataError(f"{where}: observations must be plain vectors (they are of type {got})")
    columns = {
        # Minari stores the state after the last action too.
        "observations": np.concatenate([e.observations[: len(e.rewards)] for e in episodes]),
        "actions": np.concatenate([e.actions for e in episodes]),
        "rewards": np.concatenate([e.rewards for e in episodes]),
        "terminals": np.concatenate([np.arange(len(e.rewards)) == len(e.rewards) - 1 for e in episodes]),
    }
    return from_columns(name or identifier, columns, where=where, source=f"Minari {identifier}")


def from_columns(name: str, columns: Mapping[str, Any], *, where: str, source: str = ORIGINAL) -> Trajectories:
    """Return checked trajectories from the columns of D4RL's layout."""
    for key in KEYS:
        if key not in columns:
            raise DataError(f"{where}: lacks {key!r} (has {', '.join(columns) or 'none of the keys of D4RL'})")
    observations, actions = (_to_floats(columns[key], key, where, axes=2) for key in ("observations", "actions"))
    rewards = _to_floats(columns["rewards"], "rewards", where, axes=1)
    flags = {key: _to_flags(columns[key], key, where) for key in ("terminals", "timeouts") if key in columns}
    rows = len(observations)
    for key, column in {"actions": actions, "rewards": rewards, **flags}.items():
        if len(column) != rows:
            raise DataError(f"{where}: {key} has {len(column)} rows where observations has {rows}")
    ended = flags["terminals"]
    ended = ended | flags["timeouts"] if "timeouts" in flags else _with_horizon(ended)
    (last,) = np.nonzero(ended)
    if len(last) == 0:
        raise DataError(f"{where}: no episode ends in its {rows} rows (terminals and timeouts are all false)")
    complete = slice(int(last[-1]) + 1)
    starts = np.append(0, last[:-1] + 1).astype(np.int64)
    return Trajectories(name, observations[complete], actions[complete], rewards[complete], starts, source)


def _with_horizon(ended: np.ndarray) -> np.ndarray:
    """Add the ends by time limit to those of a file without `timeouts`."""
    starts = np.append(0, np.flatnonzero(ended) + 1)
    position = np.arange(len(ended)) - np.repeat(starts, np.diff(starts, append=len(ended)))
    return ended | (position % HORIZON == HORIZON - 1)


def _to_floats(values: Any, key: str, where: str, axes: int) -> np.ndarray:
    """Return a finite float32 array of one or two axes."""
    with np.errstate(over="ignore"):
        array = _check_column(values, key, where, "fiu", axes).astype(np.float32)
    if not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array.reshape(len(array), -1)).all(axis=1)))
        raise DataError(f"{where}: {key} has a value that is not finite in row {row}")
    return array


def _to_flags(values: Any, key: str, where: str) -> np.ndarray:
    """Return a column of booleans, stored as such or as numbers 0 and 1; the string "False" would count as true."""
    array = _check_column(values, key, where, "bfiu", axes=1)
    if not np.isin(array, (0, 1)).all():
        raise DataError(f"{where}: {key} must hold booleans, or the numbers 0 and 1")
    return array.astype(bool)


def _check_column(values: Any, key: str, where: str, kinds: str, axes: int) -> np.ndarray:
    """Refuse other types than `kinds` and other shapes; (rows, 1) counts as one axis."""
    array = np.asarray(values)
    if axes == 1 and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in kinds or array.ndim != axes or 0 in array.shape[1:]:
        shape = "(rows, width)" if axes == 2 else "(rows,)"
        raise DataError(f"{where}: {key} must be numbers of shape {shape} (got {array.dtype} of shape {array.shape})")
    return array
