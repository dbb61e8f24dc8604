"""Generation: the state of softmax attention grows with the tokens read, that of Primal-Attention does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from primal_attention.bench import generate
from primal_attention.bench.attention import Shape
from primal_attention.bench.measurement import format_report, plot_report
from primal_attention.models.lm import LanguageModel
from primal_attention.nn.blocks import BlockState


def test_only_the_cache_of_softmax_attention_grows_with_the_tokens_read(flags, tmp_path):
    report = generate.run(flags("generate --rank 4 --widths 16:2 --lengths 16 40 --batches 2 3 --layers 2"))
    sizes = {}
    for row in report["rows"]:
        assert row["status"] == "ok", row["note"]
        assert row["tokens_per_second"] == row["batch"] / row["seconds"]
        sizes.setdefault((row["name"], row["batch"]), []).append(row["state_bytes"])
    assert list(sizes)[:4] == [(name, 2) for name in ("sdpa", "primal-mean", "primal-decay", "primal-delta")]
    for (name, _), (short, long) in sizes.items():
        assert long - short == (24 * 2 * (2 * 16 * 4) if name == "sdpa" else 0)  # keys and values of two layers
    assert "of a language model of 2 layers" in format_report(report)
    pytest.importorskip("matplotlib")
    assert len(plot_report(report, tmp_path / "generate")) == 2


def test_the_preallocated_cache_gives_the_logits_of_the_model():
    shape = Shape(16, 2, batch=2, length=5)
    model = generate.build_model(2, {"attention": ("softmax",)}, shape).eval()
    plain = LanguageModel(model.config).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(100, (2, 6))
    _, state = plain(tokens[:, :5], return_state=True)
    room = [c.attention._replace(k=F.pad(c.attention.k, (0, 0, 0, 1)), v=F.pad(c.attention.v, (0, 0, 0, 1)))
            for c in state.blocks]  # fmt: skip
    logits, _ = model.step(tokens[:, 5], state._replace(blocks=tuple(BlockState(cache, None) for cache in room)))
    torch.testing.assert_close(logits, plain.step(tokens[:, 5], state)[0])
