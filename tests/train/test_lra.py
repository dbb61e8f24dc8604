"""Long-Range Arena: the paper's settings, steps for epochs, batches without padding, runs that repeat or compile."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from faults import assert_resumes_to_the_same

from primal_attention.data.lra import pathfinder
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.models.lra import LRAClassifier
from primal_attention.train import loop, lra, registry
from primal_attention.train.config import override
from primal_attention.train.lra import TASKS, LRARecipe, TokenBatches, bucket_widths, build_from, count_lengths
from primal_attention.utils.errors import RunError


def small(name: str = "lra/listops", folder: Path | None = None, **changes: Any) -> LRARecipe:
    return toy.small(name, folder, **changes)


@pytest.fixture(scope="module")
def expressions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_expressions(tmp_path_factory.mktemp("listops"))


def made_up(length: int = 12, *, pairs: bool = False) -> TokenData:
    """Random tokens: short samples, and three in every split that have the full length."""
    rng = np.random.default_rng(0)

    def split(count: int) -> TokenSplit:
        draws = [rng.integers(1, 20, (count, length), dtype=np.uint8) for _ in range(2)]
        for tokens in draws:
            tokens[:-3, 7:] = 0
        return TokenSplit(draws[0], np.arange(count) % 2, draws[1] if pairs else None)

    return TokenData("listops", split(8), split(6), split(6), vocabulary=20, classes=2, padded=True)


# Recipes


@pytest.mark.parametrize("task", TASKS)
def test_the_papers_settings_and_a_shorter_training_of_the_same_model(task: str):
    recipe, published = registry.get(f"lra/{task}").resolved(), TASKS[task]
    trainer, optim, model = recipe.trainer, recipe.optim, recipe.model
    assert trainer.epochs * trainer.steps_per_epoch == published.steps
    assert round(optim.warmup * published.steps) == published.warmup
    schedule = (optim.name, optim.lr, optim.eps, optim.weight_decay, optim.schedule)
    assert schedule == ("adamw", 1e-4, 1e-6, 0.0, "onecycle-linear")
    assert (model.embed_dim, model.num_heads, model.layers, model.ffn_dim, model.dropout) == (64, 2, 2, 128, 0.1)
    assert (model.rank, recipe.eta, model.landmarks) == (*published.former, 10 * published.former[0])
    plus = override(registry.get(f"lra/{task}"), {"model.attention": ("primal+",)}).resolved()
    assert (plus.model.rank, plus.eta) == published.plus
    short = registry.get(f"lra-short/{task}").resolved()
    # Initial positions and the landmarks of training are not part of the trained model.
    assert dataclasses.replace(short.model, positions="random", sampling="even") == model
    assert TASKS["text"] == (20_000, 8_000, 32, 500, (20, 0.05), (30, 0.1))
    samples = [r.trainer.epochs * r.trainer.steps_per_epoch * r.trainer.batch_size for r in (short, recipe)]
    assert samples[0] <= samples[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__attention": ("softmax",)},
        {"model__attention": ("linformer",)},
        {"model__r_scores": False},
        {"model__sampling": "random", "model__data_dependent": False},  # no landmarks that could move
        {"model__published_padding": True},
        {"name": "lra/retrieval"},
        *({"name": "lra-modern/text", "model__attention": (name,)} for name in ("primal", "softmax", "none")),
    ],
    ids=str,
)
def test_variants_train(changes):
    is_pair = changes.get("name") == "lra/retrieval"
    experiment = build_from(small(**changes).resolved(), made_up(pairs=is_pair))
    batch = next(iter(experiment.train))
    assert {t.dtype for t in batch[:-1]} == {torch.uint8}
    loss = experiment.module(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert 0 <= experiment.module.evaluate(experiment.test)["accuracy"] <= 1


@pytest.mark.parametrize("attention", ["primal", "primal+", "nystrom", "linformer"])
def test_a_batch_may_be_cut_where_its_padding_begins(attention):
    """The losses, J included, are those of the uncut batch."""
    data = made_up()
    module = build_from(small(model__attention=(attention,), model__dropout=0.0).resolved(), data).module
    tokens, labels = torch.from_numpy(data.train.tokens[:1]), torch.from_numpy(data.train.labels[:1])
    whole, cut = (module.losses((t, labels)) for t in (tokens, tokens[:, :7]))
    for name in whole:
        torch.testing.assert_close(whole[name], cut[name])


@pytest.mark.parametrize("published_padding", [False, True])
def test_sequences_are_cut_unless_padding_takes_part(published_padding, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lra, "EVALUATED_TOKENS", 0)  # evaluation batches as small as the training's
    changes = {"data__length_buckets": 2, "trainer__batch_size": 3, "watch_test": True}
    recipe = small(model__published_padding=published_padding, **changes).resolved()
    experiment = build_from(recipe, made_up(100))
    for batches in (experiment.train, experiment.test, *experiment.watched.values()):
        assert ({tokens.shape[1] for tokens, _ in batches} == {100}) == published_padding
    assert experiment.module.padded


def test_black_pixels_are_padding_only_on_request(tmp_path: Path):
    pathfinder.write(tmp_path, {"train": 8, "valid": 2, "test": 2})
    for zero_is_padding in (False, True):
        experiment = loop.build(small("lra/pathfinder", tmp_path, data__zero_is_padding=zero_is_padding).resolved())
        assert experiment.module.padded == zero_is_padding
        assert (experiment.module.model.max_tokens is not None) == zero_is_padding
        assert experiment.train.lengths is None
        assert torch.isfinite(experiment.module(next(iter(experiment.train))))


# Batches

FULL = 640


def bucketed(batch_size: int = 8, seed: int | None = 3, steps: int = 6) -> TokenBatches:
    """200 samples of up to 640 tokens; their labels are their numbers."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (200, FULL)).astype(np.uint8)
    tokens[np.arange(FULL) >= rng.integers(5, FULL, (200, 1))] = 0
    lengths = count_lengths(tokens)
    widths = bucket_widths(lengths, FULL, 4, batch_size) if seed is not None else ()
    tensors = [torch.from_numpy(tokens), torch.arange(200)]
    return TokenBatches(tensors, batch_size, seed, steps, lengths=lengths, widths=widths)


def test_lengths_end_at_the_last_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lra, "ROWS_AT_ONCE", 3)
    tokens = np.array([[1, 2, 0, 0], [0, 3, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]], dtype=np.uint8)
    assert count_lengths(tokens).tolist() == [2, 2, 4, 4]


def test_every_bucket_holds_half_of_the_rest():
    lengths = torch.arange(1, 1025)
    assert bucket_widths(lengths, 1024, 4, 8) == [512, 768, 896, 1024]
    assert bucket_widths(lengths, 1024, 1, 8) == [1024]
    assert bucket_widths(torch.full((100,), 7), 100, 4, 8) == [100], "one bucket if all lengths are equal"
    assert bucket_widths(torch.arange(1, 11), 10, 4, 8) == [10], "no bucket that cannot fill a batch"


def test_batches_of_a_bucket_have_one_width_and_lose_no_token():
    batches = bucketed(steps=25)  # a pass
    batches.group = 4
    for epoch in range(2):
        batches.epoch = epoch
        seen, shapes = [], set()
        for tokens, numbers in batches:
            shapes.add(tuple(tokens.shape))
            whole = torch.nn.functional.pad(tokens, (0, FULL - tokens.shape[1]))
            assert torch.equal(whole, batches.tensors[0][numbers])
            seen += numbers.tolist()
        assert sorted(seen) == list(range(200)), "every sample once in a pass"
        assert shapes == {(8, width) for width in batches.widths}
        assert len(shapes) > 2


def test_an_evaluation_takes_every_sample_once_and_bounds_the_tokens_of_a_batch():
    seen = []
    for tokens, numbers in bucketed(seed=None, steps=0):
        assert tokens.numel() <= 8 * FULL
        assert (tokens != 0).sum(dim=1).max() > tokens.shape[1] - lra.WIDTH_MULTIPLE
        seen += numbers.tolist()
    assert sorted(seen) == list(range(200))


# Runs


def test_a_run_counts_steps_validation_chooses_and_a_cut_off_one_resumes(expressions: Path, tmp_path: Path):
    assert_resumes_to_the_same(small(folder=expressions), tmp_path, step=4)
    run = next(place.parent for place in tmp_path.rglob("summary.json"))
    summary = loop.read_summary(run)
    rows = toy.rows(run)
    assert [row["step"] for row in rows] == [3, 6]
    assert "test_accuracy" not in rows[0], "test is evaluated once, at the end"
    assert set(summary["scores"]) == {"validation_chosen"}
    assert summary["data"]["max_length"] == 2000
    for row in rows:  # J is squared after the batch's mean; the mean of squares is at least the square of the mean
        assert row["ksvd_loss"] >= row["J"] ** 2 - 1e-6
    assert loop.evaluate(run)[""] == summary["test"]


# Compiled runs


def compile_with(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LRAClassifier.compile
    monkeypatch.setattr(LRAClassifier, "compile", lambda self, **given: usual(self, backend=backend, **given))


def test_a_compiled_training_is_the_training(expressions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Batches of several widths, in the steps that a GPU would record."""
    needs_gradients: list[bool] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        needs_gradients.append(torch.is_grad_enabled())
        return module.forward

    compile_with(backend, monkeypatch)
    changes = {"trainer__graph": "on", "model__attention": ("primal+",), "trainer__epochs": 1}
    for mode in ("off", "on"):
        loop.train(small("lra-short/listops", expressions, trainer__compile=mode, **changes), tmp_path / mode)
    for file in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / "on" / file).read_bytes() == (tmp_path / "off" / file).read_bytes()
    assert len(needs_gradients) == 4, "stem, mean and each kind of block: one graph for all widths"
    assert all(needs_gradients), "evaluations run eagerly"


def test_a_compiler_that_fails_is_one_line(expressions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        raise OSError("no compiler here")

    compile_with(backend, monkeypatch)
    with pytest.raises(RunError, match=r"no compiler here.*add --trainer.compile off"):
        loop.train(small(folder=expressions, trainer__compile="on"), tmp_path / "run")


@pytest.mark.gpu
@pytest.mark.parametrize(("attention", "blocks"), [("primal+", 2), ("reformer", 1)])
def test_on_a_gpu_compiled_steps_are_recorded_and_train_alike(
    expressions: Path, tmp_path: Path, attention: str, blocks: int
):
    from torch._dynamo.utils import counters

    settings = {
        "model__attention": (attention,),
        "model__dropout": 0.0,
        "model__embed_dim": 32,
        "trainer__accelerator": "gpu",
        "trainer__precision": "bf16-mixed",
        "trainer__epochs": 4,
        "trainer__steps_per_epoch": 16,
    }
    losses = []
    for mode in ("off", "auto"):
        counters.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "steps run without a CUDA graph")
            loop.train(small("lra-short/listops", expressions, trainer__compile=mode, **settings), tmp_path / mode)
        losses.append([row["loss"] for row in toy.rows(tmp_path / mode)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)  # bfloat16, rounded in other places
    assert counters["stats"]["unique_graphs"] == 2 + blocks, "one graph of each part for all widths"
    assert not counters["graph_break"]
