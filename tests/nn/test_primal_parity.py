"""The layer equals the authors' implementation: outputs, scores, loss and every gradient, in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from golden_files import load, storage_ratio
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.landmarks import landmark_indices

FILES = (
    "uea_N26_H8_hd32_s20_rm5",
    "uea_N62_H4_hd32_s20_rm5",
    "uea_N152_H2_hd64_s30_rm5",
    "lra_N152_H2_hd32_s20_rm5_mask",
    "lra_N62_H2_hd32_s20_rm5_tracex_repeatidx",
    "lra_dual_N152_H2_hd32_s20_rm5",
    "cv_N62_H6_hd64_s96_rm10",
    "cv_N197_H2_hd32_s30_rm5_sampled",
    "rl_N62_H4_hd32_s32",
    "nlp_N152_H8_hd32_s30",
)
SQUARE_OF_THE_MEAN = ("lra", "cv")  # the other code bases average the squares
CAUSAL = ("rl", "nlp")
# Our parameters by their names in the files, where q and k may be separate.
NAMES = {
    "qk_proj.weight": "Wqk",
    "qk_proj.bias": "bqk",
    "w_e": "We",
    "w_r": "Wr",
    "sqrt_lambda": "Lambda",
    "score_proj.weight": "Wo",
    "score_proj.bias": "bo",
    "out_proj.weight": "Wout",
    "out_proj.bias": "bout",
}


def parts_of(golden: dict[str, Tensor], own_name: str) -> list[str]:
    """The names of the stored arrays that form one of our parameters."""
    name = NAMES[own_name]
    return [name] if f"p_{name}" in golden else [name.replace("qk", "q"), name.replace("qk", "k")]


def layer_of(golden: dict[str, Tensor], meta: dict[str, Any], backend: str) -> PrimalAttention:
    causal, trace = meta["kind"] in CAUSAL, "weights" if meta["trace_no_x"] else "projections"
    settings: dict[str, Any] = {"rank": meta["s"], "landmarks": meta["n"] or 1, "objective_trace": trace}
    settings |= {"causal": causal, "data_dependent": not causal, "backend": backend, "dtype": torch.float64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some published ranks are above the head width
        layer = PrimalAttention(meta["H"] * meta["head_dim"], meta["H"], **settings)
    state = {name: torch.cat([golden[f"p_{part}"] for part in parts_of(golden, name)]) for name in NAMES}
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", FILES)
def test_the_layer_equals_the_authors_implementation(name: str, backend: str) -> None:
    golden, meta = load(name)
    layer = layer_of(golden, meta, backend)
    if layer.data_dependent:
        assert torch.equal(landmark_indices(meta["N"], meta["n"]), golden["idx"])
    tokens_first = meta["kind"] == "nlp"
    order = (lambda t: t.transpose(0, 1)) if tokens_first else (lambda t: t)
    suffixes = ("", "1") if meta["dual"] else ("",)

    xs = [golden[f"x{i}"].clone().requires_grad_() for i in suffixes]
    # The two sequences of a retrieval pair share one loss: to the layer they are one batch.
    y, scores = layer(torch.cat([order(x) for x in xs]), return_scores=True)
    if "mask" in golden:
        # The authors' code lets padding into f(X) and the loss and only blanks the output of the heads. The mask of
        # the layer is stricter, so it runs without one and the output is blanked here.
        padding = (golden["mask"] == 0).repeat(len(suffixes), 1)
        y = torch.where(padding[..., None], layer.out_proj.bias, y)
    ksvd = ksvd_loss(layer, "batch" if meta["kind"] in SQUARE_OF_THE_MEAN else "sample")
    outs = y.chunk(len(suffixes))
    objective = sum((order(out) * golden["G"]).sum() for out in outs) + ksvd
    objective.backward()

    def compare(what: str, ours: Tensor) -> None:
        assert_close(ours, golden[what], storage_ratio(golden[what], meta), what)

    for i, out, e, r in zip(suffixes, outs, *(s.chunk(len(suffixes)) for s in scores), strict=True):
        compare(f"out{i}", order(out))
        compare(f"e{i}", e)
        compare(f"r{i}", r)
    compare("ksvd", ksvd)
    compare("obj", objective)
    if "ksvd_per_sample" in golden:
        compare("ksvd_per_sample", layer.objective.square())
    for i, x in zip(suffixes, xs, strict=True):
        compare(f"g_x{i}", x.grad)
    for name, parameter in layer.named_parameters():
        parts = parts_of(golden, name)
        for part, grad in zip(parts, parameter.grad.chunk(len(parts)), strict=True):
            if f"g_{part}" in golden:
                compare(f"g_{part}", grad)
            else:  # a large matrix is stored as two products with fixed vectors
                compare(f"g_{part}_uT", golden[f"g_{part}_u"] @ grad)
                compare(f"g_{part}_Av", grad @ golden[f"g_{part}_v"])
