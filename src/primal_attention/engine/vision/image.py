"""Image classification: DeiT-Small/16 with Primal-Attention in its last layer, trained the way DeiT was.

primal train image/deit-small --data.folder data/imagenet                              ImageNet-1K
primal train image/deit-small --data.folder data/imagenet --data.classes in100.txt     ImageNet-100
primal train image/imagenette --model.attention softmax                                the baseline, a small set
primal table image                                                                     all three models, three seeds

One training holds a tenth of the training images out. Its three readings are the last epoch, the epoch that the
held-out images choose, and, apart, the best epoch on test, which is no fair number.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from primal_attention.engine.config import OptimConfig, Recipe, TrainerConfig, require

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.data.images import ImageData
    from primal_attention.engine.experiment import Experiment

ETA = 0.05  # of the paper
RANK = 96


@dataclass(frozen=True)
class ImageFolder:
    """Where the images lie and how they come to the device."""

    folder: Path | None = None
    """With train/CLASS/*.jpg and val/CLASS/*.jpg; None is $PRIMAL_IMAGES or data/images. val is the test set."""
    classes: Path | None = None
    """File with one class folder per line, to use those only; None is all (ImageNet-100 is a list of 100)."""
    size: int = 224
    """Side of the images that the model sees."""
    cache: Literal["none", "device"] = "none"
    """none: workers read files. device: decode once, keep all pixels on the device and augment them there."""
    holdout: float = 0.1
    """Part of the training images, class by class, that chooses the epoch."""
    workers: int = 8
    """Processes that read files."""
    strict: bool = False
    """An image that does not decode is an error; else it is named and skipped."""

    def __post_init__(self) -> None:
        require(0 < self.holdout < 1, f"data.holdout must lie between 0 and 1 (got {self.holdout})")
        require(self.size >= 1, f"data.size must be at least 1 (got {self.size})")
        require(self.workers >= 0, f"data.workers must not be negative (got {self.workers})")


@dataclass(frozen=True)
class ImageModel:
    """The network; see primal_attention.models.vision."""

    attention: tuple[str, ...] = ("primal+",)
    """softmax, primal (all layers), primal+ (the last layer), or softmax and primal by name for each layer."""
    library: Literal["auto", "timm", "transformers"] = "auto"
    """Whose network; auto takes timm where it is installed."""
    patch_size: int = 16
    embed_dim: int = 384
    num_heads: int = 6
    layers: int = 12
    drop_path: float = 0.1
    """Stochastic depth: the last layer's rate, growing from zero."""
    rank: int | None = None
    """Directions s of Primal-Attention; None takes the paper's 96."""
    landmarks: int | None = None
    """Rows that make f(X); None is ten times the rank, at most all tokens, as in the paper."""
    data_dependent: bool = True
    """Build Primal-Attention's projection weights from f(X); off uses W_e and W_r themselves."""

    def __post_init__(self) -> None:
        for name in ("patch_size", "embed_dim", "num_heads", "layers", "rank", "landmarks"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name.replace('_', '-')} must be at least 1 (got {value})")
        require(0 <= self.drop_path < 1, f"model.drop-path must lie in [0, 1) (got {self.drop_path})")


@dataclass(frozen=True)
class ImageRecipe(Recipe):
    """A classifier of images in class folders."""

    benchmark: ClassVar[str] = "image"

    augment: Literal["deit", "light", "none"] = "deit"
    """deit: DeiT's RandAugment, erasing, mixup, cutmix, smoothing, repetition. light: for short trainings. none: crop
    and flip."""
    data: ImageFolder = field(default_factory=ImageFolder)
    model: ImageModel = field(default_factory=ImageModel)

    def resolved(self) -> ImageRecipe:
        model = dataclasses.replace(self.model, rank=self.model.rank or RANK)
        return dataclasses.replace(self, eta=ETA if self.eta is None else self.eta, model=model)

    def label(self) -> str:
        return "-".join(self.model.attention)

    def build(self) -> Experiment:
        recipe = self.resolved()
        from primal_attention.data import images

        return build_from(recipe, images.load(recipe.data.folder or default_folder(), recipe.data.classes))


def deit_small() -> ImageRecipe:
    """DeiT's training: 300 epochs, batch 1024, AdamW at 1e-3, five epochs up and a cosine down, decay 0.05."""
    # Steps of this size keep the device busy: recording them would only hold more memory.
    return ImageRecipe(
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, schedule="onecycle", warmup=5 / 300, clip=0.0),
        trainer=TrainerConfig(epochs=300, batch_size=1024, precision="bf16-mixed", compile="on", graph="off"),
    )


def imagenette() -> ImageRecipe:
    """Ten classes of ImageNet, 128 pixels: patches of 8 at 112 pixels keep DeiT-Small's 197 tokens."""
    return dataclasses.replace(
        deit_small(),
        augment="light",
        data=ImageFolder(size=112, cache="device"),
        model=ImageModel(patch_size=8),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, schedule="onecycle", warmup=0.1, clip=1.0),
        trainer=TrainerConfig(epochs=40, batch_size=256, precision="bf16-mixed", compile="on"),
    )


MEMBERS = {"deit-small": deit_small, "imagenette": imagenette}


def paper_recipe(name: str) -> ImageRecipe:
    return MEMBERS[name]()


def default_folder() -> Path:
    """$PRIMAL_IMAGES, or data/images under the working directory."""
    return Path(os.environ.get("PRIMAL_IMAGES", "data/images"))


def make_model(config: ImageModel, size: int, classes: int) -> nn.Module:
    """The network of a resolved configuration."""
    from primal_attention.models.vision import deit

    return deit(
        classes,
        attention=config.attention,
        image_size=size,
        patch_size=config.patch_size,
        embed_dim=config.embed_dim,
        num_heads=config.num_heads,
        layers=config.layers,
        drop_path=config.drop_path,
        rank=config.rank or RANK,
        landmarks=config.landmarks,
        data_dependent=config.data_dependent,
        library=config.library,
    )


def build_from(recipe: ImageRecipe, data: ImageData) -> Experiment:
    """The experiment of a resolved recipe on files that are already listed."""
    from primal_attention.engine.experiment import Experiment
    from primal_attention.engine.vision.image_batches import file_batches, pixel_batches
    from primal_attention.engine.vision.image_module import ImageModule

    train, val, test = (pixel_batches if recipe.data.cache == "device" else file_batches)(recipe, data)
    model = make_model(recipe.model, recipe.data.size, len(data.classes))
    return Experiment(
        module=ImageModule(model, recipe, len(data.classes)),
        train=train,
        test=test,
        watched={"val": val, "test": test},
        select=("val", "accuracy"),
        facts={
            "set": data.folder.name,
            "train_cases": train.cases,
            "validation_cases": val.cases,
            "test_cases": test.cases,
            "images_per_epoch": train.steps * min(train.batch_size, train.cases),
            "classes": len(data.classes),
            "max_length": (recipe.data.size // recipe.model.patch_size) ** 2 + 1,
        },
    )
