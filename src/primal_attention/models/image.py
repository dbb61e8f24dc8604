"""Image classifiers: DeiT (Touvron et al., 2021) with Primal-Attention in the last layer, in all layers, or in none.

The network is timm's or transformers' own; `primalize` replaces the attention. Images of 224 pixels in patches
of 16 make N = 197 tokens, the class token included.

    model = deit(1000, attention="primal+", rank=96)
    logits = model(images)   # uint8 (B, 3, S, S), which the model normalises, or normalised floats
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from primal_attention.convert.replace import primalize
from primal_attention.nn.blocks import attention_names

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels
LANDMARKS_PER_RANK = 10  # at most the number of tokens
Library = Literal["auto", "timm", "transformers"]


class StochasticDepth(nn.Module):
    """Drop a residual branch for some of the samples in training, and scale up the others."""

    keep: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        # A buffer, because torch.compile would compile each layer for its own number.
        self.register_buffer("keep", torch.tensor(1.0 - rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        is_active = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < self.keep
        return x * (is_active / self.keep).to(x.dtype)


class ImageClassifier(nn.Module):
    """Images to logits (B, classes), with the normalisation that the network was trained with.

    Args:
        backbone: A network of timm or transformers.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1), persistent=False)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(find_blocks(self.backbone))

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = (images / 255 - self.mean) / self.std
        output = self.backbone(images)
        return output if isinstance(output, Tensor) else output.logits

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile block by block: equal blocks are compiled once."""
        for block in self.blocks:
            block.compile(*args, **kwargs)


def deit(
    classes: int,
    *,
    attention: str | Sequence[str] = "primal+",
    image_size: int = 224,
    patch_size: int = 16,
    embed_dim: int = 384,
    num_heads: int = 6,
    layers: int = 12,
    mlp_ratio: int = 4,
    drop_path: float = 0.1,
    rank: int = 96,
    landmarks: int | None = None,
    data_dependent: bool = True,
    library: Library = "auto",
) -> ImageClassifier:
    """DeiT with one class token; the default sizes are those of DeiT-Small/16.

    Args:
        classes: Number of classes.
        attention: "softmax", "primal" in all layers, "primal+" in the last layer, or one name per layer.
        image_size: Height and width of the images.
        patch_size: Height and width of a patch.
        embed_dim: Width of the tokens.
        num_heads: Number of heads.
        layers: Number of blocks.
        mlp_ratio: Width of the feed-forward layers over embed_dim.
        drop_path: Rate of stochastic depth in the last layer; it grows from zero along the layers.
        rank: Directions s of Primal-Attention.
        landmarks: None is ten times the rank, at most the number of tokens, as in the paper.
        data_dependent: Build the projection weights from landmarks.
        library: Source of the network; "auto" uses timm where it is installed.
    """
    if image_size % patch_size:
        raise ValueError(f"patch_size must divide image_size (patch_size={patch_size}, image_size={image_size})")
    if not 0 <= drop_path < 1:
        raise ValueError(f"drop_path must lie in [0, 1) (got {drop_path})")
    names = attention_names(attention, layers)
    if not set(names) <= {"softmax", "primal"}:
        raise ValueError(f"attention must be softmax, primal or primal+ (got {' '.join(names)!r})")
    chosen = [i for i, name in enumerate(names) if name == "primal"]
    make = {"timm": _timm, "transformers": _transformers}[choose_library(library)]
    backbone = make(classes, image_size, patch_size, embed_dim, num_heads, layers, mlp_ratio)
    if chosen:
        tokens = (image_size // patch_size) ** 2 + 1
        rows = landmarks or min(LANDMARKS_PER_RANK * rank, tokens)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="rank=")  # the paper's rank 96 is above the heads' width of 64
            primalize(backbone, chosen, rank=rank, landmarks=rows, data_dependent=data_dependent, causal=False)
    model = ImageClassifier(backbone)
    if drop_path:
        _add_stochastic_depth(model.blocks, drop_path)
    return model


def choose_library(library: Library) -> Literal["timm", "transformers"]:
    """Return the library that provides the network."""
    if library not in ("auto", "timm", "transformers"):
        raise ValueError(f"library must be auto, timm or transformers (got {library!r})")
    needs = {"timm": ("timm", "torchvision"), "transformers": ("transformers",)}
    installed = [name for name, packages in needs.items() if all(map(find_spec, packages))]
    if library != "auto" and library not in installed:
        extra = {"timm": "vision", "transformers": "hf"}[library]
        raise ValueError(f"library={library!r} is not installed: pip install 'primal-attention[{extra}]'")
    if not installed:
        raise ValueError("image models need timm or transformers: pip install 'primal-attention[vision]'")
    return installed[0] if library == "auto" else library  # type: ignore[return-value]


def _timm(classes: int, size: int, patch: int, width: int, heads: int, layers: int, ratio: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=width, depth=layers, num_heads=heads, mlp_ratio=ratio,
        num_classes=classes,
    )  # fmt: skip


def _transformers(classes: int, size: int, patch: int, width: int, heads: int, layers: int, ratio: int) -> nn.Module:
    # Its DeiT has a second token for distillation. Its ViT is DeiT without that token, and DeiT's weights load into it.
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size, patch_size=patch, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=ratio * width, layer_norm_eps=1e-6, num_labels=classes,  # type: ignore[call-arg]
    )  # fmt: skip
    return ViTForImageClassification(config)


def find_blocks(backbone: nn.Module) -> Sequence[nn.Module]:
    """Return the Transformer blocks of a network of timm or transformers."""
    inner: Any = getattr(backbone, "vit", backbone)
    for name in ("blocks", "layers"):
        if hasattr(inner, name):
            return getattr(inner, name)
    return inner.encoder.layer


def _add_stochastic_depth(blocks: Sequence[nn.Module], rate: float) -> None:
    for i, block in enumerate(blocks):
        drop_path = StochasticDepth(rate * i / max(1, len(blocks) - 1))
        # timm has a module after each branch; transformers uses one dropout, which is off, for both branches.
        places = [name for name in ("drop_path1", "drop_path2", "dropout") if hasattr(block, name)]
        if not places:
            kind = type(block).__name__
            raise ValueError(f"{kind} of this version has no drop_path: use drop_path=0 or another library")
        for name in places:
            setattr(block, name, drop_path)
