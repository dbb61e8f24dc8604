"""Image classification: DeiT-Small/16 with Primal-Attention in its last layer, trained like DeiT.

    primal train image/deit-small --data.folder data/imagenet                              ImageNet-1K
    primal train image/deit-small --data.folder data/imagenet --data.classes in100.txt     ImageNet-100
    primal train image/imagenette --model.attention softmax                                the baseline, a small set
    primal table image                                                                     all three models, three seeds

The loss is cross-entropy with mixed and smoothed labels; J is squared after the batch's mean. A tenth of the training
images is held out. A run reports the last epoch, the epoch that the holdout chooses, and the best epoch on test.

A batch is (images (B, 3, S, S), labels (B,)), read by worker processes. Evaluation images are uint8, training images
are augmented and normalised by torchvision; the labels of mixed images are class probabilities (B, classes). The order
depends on the seed and the epoch alone, and a worker's random numbers for an image on its position in the epoch, so
that an epoch can be resumed anywhere, with any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.data import image as image_data
from primal_attention.data.image import ImageData, ImageFiles, ImageSplit, collate
from primal_attention.data.storage import default_folder
from primal_attention.data.uea import stratified_holdout
from primal_attention.models.image import deit
from primal_attention.train.config import NetworkConfig, OptimConfig, Recipe, TrainerConfig, require_range
from primal_attention.train.task import NO_LABEL, Batch, Batches, Experiment, TrainingModule, derive_seed, hash_data
from primal_attention.utils.errors import DataError

ETA, RANK = 0.05, 96  # the paper's


class Strength(NamedTuple):
    """Strength of the augmentation."""

    training: dict[str, Any]  # arguments of `data.image.training`
    mixing: dict[str, float]  # arguments of `data.image.mixing`
    smoothing: float = 0.0  # of the labels
    repeats: int = 1  # copies of an image in a batch, each with its own random numbers; an epoch keeps its length


AUGMENT = {
    "none": Strength({"smallest": 0.08, "ops": 0, "magnitude": 0.0, "erase": 0.0}, {"mixup": 0.0, "cutmix": 0.0}),
    "light": Strength(
        {"smallest": 0.35, "ops": 1, "magnitude": 0.5, "erase": 0.0}, {"mixup": 0.0, "cutmix": 1.0}, smoothing=0.1
    ),
    "deit": Strength(
        {"smallest": 0.08, "ops": 2, "magnitude": 0.9, "erase": 0.25},  # DeiT's level 9 of 10
        {"mixup": 0.8, "cutmix": 1.0},
        smoothing=0.1,
        repeats=3,
    ),
}


@dataclass(frozen=True)
class ImageFolder:
    """The images and how they reach the device."""

    folder: Path | None = None
    """With train/CLASS/*.jpg and val/CLASS/*.jpg; None is $PRIMAL_IMAGE or data/image. val is the test set."""
    classes: Path | None = None
    """File with one class folder per line, to use those only; None is all (ImageNet-100 is a list of 100)."""
    size: int = 224
    """Side of the images that the model sees."""
    holdout: float = 0.1
    """Fraction of the training images of every class that chooses the epoch."""
    workers: int = 8
    """Processes that read files."""

    def __post_init__(self) -> None:
        require_range(self, "data", "holdout", "lie between 0 and 1")
        require_range(self, "data", "size", "be at least 1")
        require_range(self, "data", "workers", "not be negative")


@dataclass(frozen=True)
class ImageModel(NetworkConfig):
    """The network; see primal_attention.models.image."""

    attention: tuple[str, ...] = ("primal+",)
    """softmax, primal (all layers), primal+ (the last layer), or softmax and primal by name for each layer."""
    library: Literal["auto", "timm", "transformers"] = "auto"
    """Source of the network; auto takes timm where it is installed."""
    patch_size: int = 16
    embed_dim: int = 384
    num_heads: int = 6
    layers: int = 12
    drop_path: float = 0.1
    """Stochastic depth: the last layer's rate; it grows linearly from zero."""
    landmarks: int | None = None
    """Rows that make f(X); None is ten times the rank, at most all tokens, as in the paper."""
    data_dependent: bool = True
    """Build Primal-Attention's projection weights from f(X); off uses W_e and W_r themselves."""


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
        model = replace(self.model, rank=self.model.rank or RANK)
        return replace(self, eta=ETA if self.eta is None else self.eta, model=model)

    def build(self) -> Experiment:
        data = image_data.load(self.data.folder or default_folder("image"), self.data.classes)
        return build_from(self.resolved(), data)


RECIPES = {
    # DeiT's training: AdamW, five epochs up and a cosine down. Its large steps keep the device busy, and a recording
    # would only take memory.
    "deit-small": ImageRecipe(
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, schedule="onecycle", warmup=5 / 300, clip=0.0),
        trainer=TrainerConfig(epochs=300, batch_size=1024, precision="bf16-mixed", compile="on", graph="off"),
    ),
    # Ten classes of ImageNet, 128 pixels: patches of 8 at 112 pixels keep DeiT-Small's 197 tokens.
    "imagenette": ImageRecipe(
        augment="light",
        data=ImageFolder(size=112),
        model=ImageModel(patch_size=8),
        optim=OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, schedule="onecycle", warmup=0.1, clip=1.0),
        trainer=TrainerConfig(epochs=40, batch_size=256, precision="bf16-mixed", compile="on"),
    ),
}


def build_from(recipe: ImageRecipe, data: ImageData) -> Experiment:
    """Return the experiment of a resolved recipe on files that are already listed."""
    train, val, test = make_batches(recipe, data)
    model = deit(len(data.classes), image_size=recipe.data.size, **vars(recipe.model))
    return Experiment(
        module=ImageModule(model, recipe),
        train=train,
        test=test,
        watched={"val": val, "test": test},
        chooses_epoch=True,
        facts={
            "set": data.folder.name,
            "sha256": hash_data((data.train, data.test, data.classes)),
            "train_samples": train.samples,
            "validation_samples": val.samples,
            "test_samples": test.samples,
            "images_per_epoch": train.samples_per_epoch,
            "classes": len(data.classes),
            "max_length": (recipe.data.size // recipe.model.patch_size) ** 2 + 1,
        },
    )


def make_batches(recipe: ImageRecipe, data: ImageData) -> list[ImageBatches]:
    """Return training, validation and test batches."""
    config, strength, batch_size = recipe.data, AUGMENT[recipe.augment], recipe.trainer.batch_size
    remaining, holdout = stratified_holdout(data.train.labels, config.holdout, recipe.seed)
    shared: dict[str, Any] = {"batch_size": batch_size, "workers": config.workers}
    train = ImageBatches(
        data.train.take(remaining),
        image_data.training(config.size, **strength.training),
        shuffle_seed=recipe.seed,
        # Full batches only, as DeiT has them; a set smaller than a batch is one.
        steps=recipe.trainer.steps_per_epoch or max(1, len(remaining) // batch_size),
        repeats=strength.repeats,
        mix=image_data.mixing(**strength.mixing, classes=len(data.classes)),
        **shared,
    )
    crop = partial(image_data.crop_centre, size=config.size)
    return [train, *(ImageBatches(split, crop, **shared) for split in (data.train.take(holdout), data.test))]


class ImageBatches(Batches):
    """Images that `workers` processes read and transform ahead of use.

    The last batch of an evaluation is filled to the size of the others by rows that no score counts, so that one shape
    is compiled.

    Args:
        split: Files and labels.
        transform: From an image to pixels.
        batch_size: Images per batch, over all ranks.
        shuffle_seed: None keeps the order of the files.
        steps: Batches per epoch; 0 is one pass, for evaluation.
        workers: Processes that read files.
        repeats: Copies of an image that follow each other in a pass, which keeps its length (repeated augmentation).
        mix: Mixes the images and the labels of a batch.
    """

    def __init__(
        self,
        split: ImageSplit,
        transform: Callable[[Any], np.ndarray],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        workers: int = 0,
        repeats: int = 1,
        mix: Callable[[Tensor, Tensor], Batch] | None = None,
    ) -> None:
        super().__init__([torch.arange(len(split))], batch_size, shuffle_seed, steps)
        self.files, self.workers = ImageFiles(split, transform), workers
        self.repeats, self.mix = repeats, mix
        self.device = torch.device("cpu")

    def order(self, turn: int) -> Tensor:
        return super().order(turn).repeat_interleave(self.repeats)[: self.samples]

    def to(self, device: torch.device) -> ImageBatches:
        self.device = torch.device(device)
        return self

    def __iter__(self) -> Iterator[Batch]:
        first = self.skip
        batches = list(self.remaining_rows())
        seed = partial(derive_seed, "image", self.shuffle_seed, self.epoch, self.rank)
        keys = ([(index, seed(b, i)) for i, index in enumerate(rows.tolist())] for b, rows in enumerate(batches, first))
        loader: Any = torch.utils.data.DataLoader(
            self.files,  # type: ignore[arg-type]
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=2 if self.workers else None,
            generator=torch.Generator(),  # else the loader draws from the training's generator
        )
        for rows, loaded in zip(batches, loader, strict=True):
            if isinstance(loaded, Path):
                raise DataError(f"{loaded} does not decode as an image")
            yield self.finish(tuple(t.to(self.device, non_blocking=True) for t in loaded), rows)

    def finish(self, batch: Batch, rows: Tensor) -> Batch:
        """Mix a training batch, outside of the recorded step: torchvision draws on the host. Fill one of evaluation."""
        images, labels = batch
        if self.mix is not None:
            return self.mix(images, labels)
        missing = 0 if self.steps else self.batch_size - len(labels)
        if missing <= 0:
            return batch
        more = images[:1].expand(missing, *images.shape[1:])
        return torch.cat([images, more]), torch.cat([labels, labels.new_full((missing,), NO_LABEL)])


class ImageModule(TrainingModule):
    """An image classifier in training."""

    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    recipe: ImageRecipe

    def task_loss(self, batch: Batch) -> Tensor:
        images, targets = batch
        return F.cross_entropy(self.model(images), targets, label_smoothing=AUGMENT[self.recipe.augment].smoothing)
