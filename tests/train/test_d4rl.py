"""Decision Transformers: windows of trajectories, their loss, episodes in MuJoCo, runs and refused input."""

import itertools
import sys

import gymnasium
import numpy as np
import pytest
import torch
import toy

from closeness import assert_close
from primal_attention.cli import main as cli
from primal_attention.data import d4rl as data
from primal_attention.train import loop
from primal_attention.train.d4rl import ContextBatches, make_environment, play
from primal_attention.utils.errors import RunError

K = 5
SHORT = "ShortHopper-v4"
SMALL = {"model.context": K, "evaluation.episodes": 3, "evaluation.env": SHORT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small set in D4RL's layout: random actions in Hopper. Also registers an environment with short episodes."""
    gymnasium.register(SHORT, "gymnasium.envs.mujoco.hopper_v4:HopperEnv", max_episode_steps=2 * K + 2)
    env, draw = make_environment("Hopper-v4"), np.random.default_rng(0)
    columns = {key: [] for key in ("observations", "actions", "rewards", "terminals")}
    for seed in range(6):
        state, fell = env.reset(seed=seed)[0], False
        while not fell:
            action = draw.uniform(-1, 1, 3)
            after, reward, fell, _, _ = env.step(action)
            for key, value in zip(columns, (state, action, reward, fell), strict=True):
                columns[key].append(value)
            state = after
    place = tmp_path_factory.mktemp("d4rl")
    np.savez(place / "hopper-medium.npz", **{k: np.asarray(v) for k, v in columns.items()})
    return place


def recipe(folder, **changes):
    return toy.small("d4rl/hopper-medium", folder, **{**SMALL, **changes})


def test_a_window_holds_what_follows_its_row_in_its_episode(folder):
    found = data.load("hopper-medium", folder)
    batches = ContextBatches(found, K, 4)
    last = int(found.ends[0]) - 1
    rows = torch.tensor([0, last - 1, last, int(found.starts[1])])
    states, actions, returns, stamps, padding = batches.gather(rows)
    assert padding.tolist() == [[n >= kept for n in range(K)] for kept in (K, 2, 1, K)]
    for row, kept, *columns in zip(rows.tolist(), (K, 2, 1, K), states, actions, returns, stamps, strict=True):
        there = slice(row, row + kept)
        whole = (found.observations, found.actions, found.returns_to_go, found.timesteps)
        for column, source in zip(columns, whole, strict=True):
            np.testing.assert_array_equal(column[:kept].numpy(), source[there])
            assert (column[kept:] == 0).all()


@pytest.mark.parametrize("attention", ["softmax", "primal+", "linear"])
def test_the_loss_is_that_of_the_valid_steps(folder, attention):
    experiment = recipe(folder, **{"model.attention": (attention,), "model.dropout": 0.0}).build()
    module, batches = experiment.module, experiment.train
    end = int(torch.from_numpy(data.load("hopper-medium", folder).ends)[0])
    batch = batches.gather(torch.tensor([0, end - 2, end - 1]))
    loss = module.task_loss(batch)
    errors = []
    for row, kept in enumerate((K, 2, 1)):
        states, actions, returns, stamps, _ = (column[row : row + 1, :kept] for column in batch)
        errors.append((module.model(states, actions, returns, stamps) - actions).square().flatten())
    assert_close(loss, torch.cat(errors).mean(), 1e-6)
    junk = [c.masked_fill(batch[-1].reshape(*batch[-1].shape, *[1] * (c.ndim - 2)), 3) for c in batch[:-1]]
    assert_close(module.task_loss((*junk, batch[-1])), loss, 1e-6, "with other values at the padding")


def trained(folder, out, **changes):
    return loop.train(recipe(folder, **changes), out, name="d4rl/hopper-medium")


def test_a_run_is_measured_by_its_episodes_and_measures_the_same_again(folder, tmp_path, capsys):
    run = tmp_path / "run"
    summary = trained(folder, run, **{"evaluation.while_training": True})
    score = summary["scores"]["last"]
    assert score["score"] == data.normalized_score("hopper", score["return_mean"])
    assert (score["episodes"], score["target"], score["epoch"]) == (3, 3600.0, 2)
    assert (summary["data"]["source"], summary["data"]["environment"]) == ("D4RL's layout", SHORT)
    watched = [row["test_score"] for row in toy.rows(run)]
    assert summary["scores"]["best_on_test"]["score"] == max(watched), "labelled as chosen on test"
    assert [score["score"]] == watched[1:]
    assert loop.evaluate(run)[""] == {k: v for k, v in score.items() if k != "epoch"}
    assert cli.main(["evaluate", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"normalised score {score['score']:6.1f}" in printed
    assert f"the run had {score['score']:.1f}" in printed
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_a_run_trained_without_environments_gets_its_score_later(folder, tmp_path, capsys):
    run = tmp_path / "run"
    summary = trained(folder, run, **{"evaluation.episodes": 0})
    assert summary["scores"]["last"] == {"epoch": 2}
    assert cli.main(["evaluate", str(run), "--episodes", "2"]) == 0
    later = loop.read_summary(run)
    whole = trained(folder, tmp_path / "whole", **{"evaluation.episodes": 2})
    assert later["scores"] == whole["scores"]
    assert later["config"] == whole["config"]
    assert cli.main(["evaluate", str(run), "--episodes", "1"]) == 0
    assert loop.read_summary(run) == later, "an existing score stays"
    assert "1 episodes, target 3600" in capsys.readouterr().out


def model_of(folder, attention="primal+"):
    torch.manual_seed(0)
    return recipe(folder, **{"model.attention": (attention,)}).build().module.model.eval()


def test_episodes_side_by_side_are_the_episodes_alone(folder):
    model, seeds = model_of(folder), [3, 4, 5]
    torch.nn.init.normal_(model.action_head.weight)  # a policy that looks at the state
    returns, lengths = play(model, "Hopper-v4", 3600.0, seeds)
    assert len(set(lengths)) > 1, "some end before the others"
    alone = [play(model, "Hopper-v4", 3600.0, [seed]) for seed in seeds]
    assert [int(length) for _, (length,) in alone] == lengths.tolist()
    # Rounding differs with the batch, and contacts amplify it.
    np.testing.assert_allclose([float(total) for (total,), _ in alone], returns, rtol=1e-3)


def test_a_step_reads_the_last_k_steps_and_the_return_still_to_come(folder, monkeypatch):
    model, seen = model_of(folder), []
    predict = model.predict
    monkeypatch.setattr(
        model, "predict", lambda *window: (seen.append([c.clone() for c in window]), predict(*window))[1]
    )
    returns, lengths = play(model, SHORT, 1000.0, [7])
    assert len(seen) == lengths[0] > K, "the episode outlasts the context"
    assert [window[0].shape[1] for window in seen] == [min(step + 1, K) for step in range(len(seen))]
    assert seen[-1][3][0].tolist() == list(range(len(seen) - K, len(seen)))
    (before, after), togo = seen[-2:], [window[2][0, -1].item() for window in seen]
    assert_close(after[0][:, :-1], before[0][:, 1:], 0.0)
    assert (after[1][:, -1] == 0).all(), "the action of this step is not known yet"
    assert togo[0] == 1000.0
    assert all(a > b for a, b in itertools.pairwise(togo)), "every step alive earns something in Hopper"
    assert 1000.0 - togo[-1] < returns[0]


def test_an_environment_that_is_not_there_is_one_line(folder, monkeypatch):
    model = model_of(folder)
    with pytest.raises(RunError, match=r"environment 'Hoper-v4' cannot be made here .*Hopper"):
        play(model, "Hoper-v4", 1.0, [0])
    with pytest.raises(RunError, match=r"'Walker2d-v4' has states of shape \(17,\) where the data has \(11,\)"):
        play(model, "Walker2d-v4", 1.0, [0])
    monkeypatch.setitem(sys.modules, "mujoco", None)
    for name in [n for n in sys.modules if n.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RunError, match=r"environment 'Hopper-v4' .*pip install 'primal-attention\[rl\]'") as told:
        make_environment("Hopper-v4")
    assert "\n" not in str(told.value)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(data.DataError, match=r"needs gymnasium\[mujoco\]: pip install 'primal-attention\[rl\]'"):
        make_environment("Hopper-v4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.minari": "mujoco/nothing/here-v0"}, "Minari set 'mujoco/nothing/here-v0'"),
        ({"model.attention": ("linformer",)}, "causal=True is not defined for attention 'linformer'"),
    ],
)
def test_a_recipe_that_cannot_be_built_is_one_line_and_leaves_no_run(folder, changes, message, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises((RunError, data.DataError), match=message) as told:
        loop.train(recipe(folder, **changes), tmp_path / "run")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_data_dependent_and_decayed_layers_are_options(folder):
    dependent = recipe(folder, **{"model.data_dependent": True}).build().module.model.blocks[-1].attention
    assert dependent.data_dependent
    assert dependent.max_length == 3 * K
    decayed = recipe(folder, **{"model.decay": True}).build().module.model.blocks[-1].attention
    assert decayed.decay is not None
