"""Trajectories of offline reinforcement learning: three layouts, what is derived from them, and what is refused."""

from pathlib import Path

import h5py
import minari
import numpy as np
import pytest
from gymnasium.spaces import Box
from minari.data_collector import EpisodeBuffer

from primal_attention.data import d4rl
from primal_attention.utils.errors import DataError

LENGTHS = (4, 1, 3)


def columns() -> dict[str, np.ndarray]:
    """Three episodes (the second ends by a fall, the others by time) and some rows of an unfinished one."""
    rows = sum(LENGTHS) + 2
    draw = np.random.default_rng(0)
    terminals, timeouts = np.zeros(rows, bool), np.zeros(rows, bool)
    terminals[4], timeouts[[3, 7]] = True, True
    return {
        "observations": draw.normal(size=(rows, 5)),
        "actions": np.tanh(draw.normal(size=(rows, 2))),
        "rewards": draw.normal(size=rows),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def write(file: Path, content: dict[str, np.ndarray], **attributes) -> Path:
    with h5py.File(file, "w") as out:
        for key, value in content.items():
            out[key] = value
        out.create_group("infos")["qpos"] = np.zeros(3)  # D4RL's files hold more than is needed
        out.attrs.update(attributes)
    return file


def check(data: d4rl.Trajectories) -> None:
    raw = columns()
    assert list(data.lengths) == list(LENGTHS)
    assert len(data) == sum(LENGTHS), "rows after the last end have no known return"
    np.testing.assert_array_equal(data.observations, raw["observations"][:8].astype(np.float32))
    np.testing.assert_array_equal(data.actions, raw["actions"][:8].astype(np.float32))
    np.testing.assert_array_equal(data.timesteps, [0, 1, 2, 3, 0, 0, 1, 2])
    rewards = raw["rewards"][:8].astype(np.float32).astype(np.float64)
    ends = [4, 4, 4, 4, 5, 8, 8, 8]
    expected = [rewards[i:end].sum() for i, end in enumerate(ends)]
    np.testing.assert_allclose(data.returns_to_go, expected, rtol=1e-6)
    np.testing.assert_array_equal(data.returns, data.returns_to_go[[0, 4, 5]])
    moments = data.observations.mean(axis=0), data.observations.std(axis=0)
    np.testing.assert_allclose(data.state_moments(), moments, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stem", ["hopper-medium-replay", "hopper-medium-replay-v2", "hopper_medium_replay-v2"])
def test_hdf5_is_found_under_either_name(tmp_path, stem):
    write(tmp_path / f"{stem}.hdf5", columns(), level="medium-replay", report="[]", env="Hopper-v4")
    data = d4rl.load("hopper-medium-replay", tmp_path)
    assert data.name == "hopper-medium-replay"
    assert data.source == "collected anew in D4RL's layout (medium-replay, Hopper-v4)"
    check(data)


def test_npz_has_the_same_keys(tmp_path):
    np.savez(tmp_path / "hopper-medium.npz", **columns(), source=np.array("simulator"))
    data = d4rl.load("hopper-medium", tmp_path)
    assert data.source == "simulator"
    check(data)


@pytest.mark.filterwarnings("ignore")  # Minari asks for an author and a licence
def test_minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    raw, start, buffers = columns(), 0, []
    for n in LENGTHS:
        rows = slice(start, start + n)
        after = np.zeros((1, 5))  # the state after the last action, which belongs to no transition
        done = np.arange(n) == n - 1
        buffers.append(
            EpisodeBuffer(
                observations=np.concatenate([raw["observations"][rows], after]),
                actions=raw["actions"][rows],
                rewards=list(raw["rewards"][rows]),
                terminations=list(done),
                truncations=[False] * n,
            )
        )
        start += n
    minari.create_dataset_from_buffers(
        "test/hopper/medium-v0",
        buffers,
        observation_space=Box(-np.inf, np.inf, (5,), np.float64),
        action_space=Box(-1, 1, (2,), np.float64),
    )
    check(d4rl.read_minari("test/hopper/medium-v0"))
    with pytest.raises(DataError, match=r"Minari set 'test/hopper/expert-v0' cannot be read .* minari download test/"):
        d4rl.read_minari("test/hopper/expert-v0")


def test_without_timeouts_an_episode_ends_when_its_time_is_up(tmp_path):
    rows = d4rl.HORIZON + 5
    terminals = np.zeros(rows, bool)
    terminals[-1] = True
    content = {"observations": np.zeros((rows, 2)), "actions": np.zeros((rows, 1)), "rewards": np.ones(rows)}
    data = d4rl.read_hdf5(write(tmp_path / "old.hdf5", {**content, "terminals": terminals}))
    assert list(data.lengths) == [d4rl.HORIZON, 5]


def test_scores_are_normalised_by_the_reference_policies():
    assert d4rl.normalized_score("hopper", -20.272305) == 0
    assert d4rl.normalized_score("walker2d-medium", 4592.3) == 100
    assert d4rl.normalized_score("halfcheetah", (12135.0 - 280.178953) / 2) == pytest.approx(50)
    assert len(d4rl.SETS) == 9
    with pytest.raises(DataError, match="names no environment with reference scores"):
        d4rl.normalized_score("ant-medium", 1.0)


def test_a_set_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"hoper-medium\.hdf5 is not in .* \(did you mean hopper-medium\?\)"):
        d4rl.load("hoper-medium", tmp_path)
