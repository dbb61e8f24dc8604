"""The published DeiT models, with or without Primal-Attention. Their weights have timm's names."""

from __future__ import annotations

import math
import re

from torch import Tensor

from primal_attention.models.image import ImageClassifier, deit, find_blocks
from primal_attention.official.state import State, count_layers, read_heads

PRIMAL = {
    "qk.": "primal.qk_proj.",
    "proj.": "primal.out_proj.",
    "concate_weight.": "primal.score_proj.",
    "we": "primal.w_e",
    "wr": "primal.w_r",
    "Lambda": "primal.sqrt_lambda",
}
# timm's names → those of the ViT in transformers.
RENAMED = (
    (r"^cls_token", "vit.embeddings.cls_token"),
    (r"^pos_embed", "vit.embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^blocks\.", "vit.layers."),
    (r"^norm\.", "vit.layernorm."),
    (r"^head\.", "classifier."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.attn\.", ".attention."),
)


def load_image(state: State, num_heads: int | None) -> ImageClassifier:
    """Return the model of a checkpoint of the research code, or of a DeiT or ViT of timm with one class token."""
    layers = count_layers(state, "blocks.")
    if layers == 0 or "pos_embed" not in state or "head.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published image models: it has no blocks, pos_embed or head.weight"
        )
    names, num_heads, primal = read_heads(state, [f"blocks.{i}.attn.we" for i in range(layers)], num_heads)
    width, _, patch, _ = state["patch_embed.proj.weight"].shape
    model = deit(
        len(state["head.weight"]),
        attention=names,
        image_size=math.isqrt(state["pos_embed"].shape[1] - 1) * patch,
        patch_size=patch,
        embed_dim=width,
        num_heads=num_heads,
        layers=layers,
        mlp_ratio=len(state["blocks.0.mlp.fc1.bias"]) // width,
        drop_path=0.0,
        rank=primal.get("rank", 1),
        landmarks=primal.get("landmarks"),
    )
    ours: dict[str, Tensor] = {}
    for name, weight in state.items():
        ours |= _rename(name, weight, names)
    if find_blocks(model.backbone) is not getattr(model.backbone, "blocks", None):
        ours = dict(item for name, weight in ours.items() for item in _for_transformers(name, weight))
    model.backbone.to(state["head.weight"].dtype).load_state_dict(ours)
    return model


def _rename(name: str, weight: Tensor, attention: list[str]) -> dict[str, Tensor]:
    parts = re.match(r"(blocks\.(\d+)\.attn\.)(.*)", name)
    if not parts or attention[int(parts[2])] == "softmax":
        return {name: weight}
    for theirs, ours in PRIMAL.items():
        if parts[3].startswith(theirs):
            return {parts[1] + ours + parts[3].removeprefix(theirs): weight}
    raise ValueError(f"state_dict has {name}, which no published image model has")


def _for_transformers(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    joint = re.match(r"(blocks\.\d+\.attn\.)qkv\.(weight|bias)$", name)
    named = [(name, weight)]
    if joint:  # one projection for q, k and v
        named = [(f"{joint[1]}{part}_proj.{joint[2]}", w) for part, w in zip("qkv", weight.chunk(3), strict=True)]
    for pattern, ours in RENAMED:
        named = [(re.sub(pattern, ours, n), w) for n, w in named]
    return named
