"""Image classification: DeiT-Small/16 with Primal-Attention in its last layer, trained like DeiT.

    primal train image/deit-small --data.folder data/imagenet                              ImageNet-1K
    primal train image/deit-small --data.folder data/imagenet --data.classes in100.txt     ImageNet-100
    primal train image/imagenette --model.attention softmax                                the baseline, a small set
    primal table image                                                                     all three models, three seeds

The loss is cross-entropy with mixed and smoothed labels; J is squared after the batch's mean. A tenth of the training
images is held out. A run reports the last epoch, the epoch that the holdout chooses, and the best epoch on test.

A batch is (uint8 images (B, 3, S, S), labels (B,)), read from files by worker processes or from pixels on the device.
Its order depends on the seed and the epoch alone, and a worker's random numbers for an image on its position in the
epoch, so that an epoch can be resumed anywhere, with any number of workers.

Pixels on the device are augmented there, each image with its own random numbers, by DeiT's operations: crop and flip,
RandAugment (Cubuk et al., 2020), random erasing (Zhong et al., 2020), mixup (Zhang et al., 2018) and cutmix (Yun et
al., 2019). Workers use torchvision's. Those draw on the host, one set of numbers per call, and cannot be recorded as a
part of the step. `image/imagenette` on an H200 trains on 8,630 images/s with the operations here, on 7,570 with
torchvision's before the recorded step for groups of 32 images, and on 6,580 for groups of 16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.data import image as image_data
from primal_attention.data.image import ImageData, ImageFiles, ImageSplit, collate, complain, decode_once, whole_side
from primal_attention.data.uea import stratified_holdout
from primal_attention.models.image import ImageClassifier, deit
from primal_attention.train.batches import Batches, derive_seed, set_seed
from primal_attention.train.config import NetworkConfig, OptimConfig, Recipe, TrainerConfig, require_range
from primal_attention.train.task import Batch, Experiment, TrainingModule, classification_scores, hash_data

ETA, RANK = 0.05, 96  # the paper's
NO_LABEL = -1  # of a row that only fills a batch


@dataclass(frozen=True)
class Strength:
    """Strength of the augmentation."""

    smallest: float = 0.08
    """Smallest fraction of an image's area that a crop keeps."""
    ops: int = 0
    """Operations of RandAugment for each image."""
    magnitude: float = 0.9
    """Their strength, from 0 to 1; DeiT's level 9 of 10."""
    erase: float = 0.0
    """Probability that a rectangle is replaced by noise."""
    mixup: float = 0.0
    """Parameter of the beta distribution; 0 does not mix."""
    cutmix: float = 0.0
    smoothing: float = 0.0
    repeats: int = 1
    """Copies of an image in a batch, each with its own random numbers; an epoch keeps its length."""


AUGMENT = {
    "none": Strength(),
    "light": Strength(smallest=0.35, ops=1, magnitude=0.5, cutmix=1.0, smoothing=0.1),
    "deit": Strength(ops=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3),
}


@dataclass(frozen=True)
class ImageFolder:
    """The images and how they reach the device."""

    folder: Path | None = None
    """With train/CLASS/*.jpg and val/CLASS/*.jpg; None is $PRIMAL_IMAGES or data/images. val is the test set."""
    classes: Path | None = None
    """File with one class folder per line, to use those only; None is all (ImageNet-100 is a list of 100)."""
    size: int = 224
    """Side of the images that the model sees."""
    cache: Literal["none", "device"] = "none"
    """none: workers read files. device: decode once, keep all pixels on the device and augment them there."""
    holdout: float = 0.1
    """Fraction of the training images of every class that chooses the epoch."""
    workers: int = 8
    """Processes that read files."""
    strict: bool = False
    """An image that does not decode is an error; else it is skipped with a warning."""

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
        return build_from(self.resolved(), image_data.load(self.data.folder or default_folder(), self.data.classes))


def deit_small() -> ImageRecipe:
    """DeiT's training: 300 epochs, batch 1024, AdamW at 1e-3, five epochs up and a cosine down, decay 0.05."""
    # Such large steps keep the device busy; recording them would only take memory.
    return ImageRecipe(
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, schedule="onecycle", warmup=5 / 300, clip=0.0),
        trainer=TrainerConfig(epochs=300, batch_size=1024, precision="bf16-mixed", compile="on", graph="off"),
    )


def imagenette() -> ImageRecipe:
    """Ten classes of ImageNet, 128 pixels: patches of 8 at 112 pixels keep DeiT-Small's 197 tokens."""
    return ImageRecipe(
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


def build_from(recipe: ImageRecipe, data: ImageData) -> Experiment:
    """The experiment of a resolved recipe on files that are already listed."""
    train, val, test = make_batches(recipe, data)
    settings: dict[str, Any] = {f.name: getattr(recipe.model, f.name) for f in fields(recipe.model)}
    model = deit(len(data.classes), image_size=recipe.data.size, **settings)
    return Experiment(
        module=ImageModule(model, recipe, len(data.classes)),
        train=train,
        test=test,
        watched={"val": val, "test": test},
        select=("val", "accuracy"),
        facts={
            "set": data.folder.name,
            "sha256": hash_data((data.train, data.test, data.classes)),
            "train_samples": train.samples,
            "validation_samples": val.samples,
            "test_samples": test.samples,
            "images_per_epoch": train.steps * min(train.batch_size, train.samples),
            "classes": len(data.classes),
            "max_length": (recipe.data.size // recipe.model.patch_size) ** 2 + 1,
        },
    )


def make_batches(recipe: ImageRecipe, data: ImageData) -> list[PixelBatches]:
    """Training, validation and test batches: from files, or of pixels that are decoded once."""
    config, strength, batch_size = recipe.data, AUGMENT[recipe.augment], recipe.trainer.batch_size
    make: list[Callable[..., PixelBatches]]
    if config.cache == "device":
        side = whole_side(config.size)
        pixels, labels = decode_once(data.folder, f"train-{side}", data.train, side, strict=config.strict)
        test_pixels = decode_once(data.folder, f"test-{side}", data.test, side, strict=config.strict)
        kept, held_out = stratified_holdout(labels, config.holdout, recipe.seed)
        splits = [(pixels[kept], labels[kept]), (pixels[held_out], labels[held_out]), test_pixels]
        make = [partial(PixelBatches, [torch.from_numpy(array) for array in split]) for split in splits]
    else:
        kept, held_out = stratified_holdout(data.train.labels, config.holdout, recipe.seed)
        files = [data.train.take(kept), data.train.take(held_out), data.test]
        crop = image_data.evaluation(config.size)
        random_crop = image_data.training(
            config.size, smallest=strength.smallest, ops=strength.ops, magnitude=strength.magnitude
        )
        make = [
            partial(FileBatches, split, transform, workers=config.workers, strict=config.strict)
            for split, transform in zip(files, (random_crop, crop, crop), strict=True)
        ]
    # Full batches only, as DeiT has them; a set smaller than a batch is one.
    steps = recipe.trainer.steps_per_epoch or max(1, len(kept) // batch_size)
    train = make[0](batch_size=batch_size, shuffle_seed=recipe.seed, steps=steps, repeats=strength.repeats)
    return [train, *(evaluated(batch_size=batch_size, fill=True) for evaluated in make[1:])]


class PixelBatches(Batches):
    """Decoded images, all on the device.

    repeats: copies of an image that follow each other in a pass, which keeps its length (repeated augmentation).
    fill: extend the last batch to the size of the others by rows that no score counts, so that one shape is compiled.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        repeats: int = 1,
        fill: bool = False,
    ) -> None:
        super().__init__(tensors, batch_size, shuffle_seed, steps)
        self.repeats, self.fill = repeats, fill

    def order(self, turn: int) -> Tensor:
        return super().order(turn).repeat_interleave(self.repeats)[: self.samples]

    def finish(self, batch: Batch, rows: Tensor) -> Batch:
        images, labels = batch
        missing = self.batch_size - len(labels)
        if not self.fill or missing <= 0:
            return images, labels
        more = images[:1].expand(missing, *images.shape[1:])
        return torch.cat([images, more]), torch.cat([labels, labels.new_full((missing,), NO_LABEL)])


class SeededFiles:
    """Images by (position in an epoch, index); the position seeds the random numbers of the transform."""

    def __init__(self, files: ImageFiles, *seed: object) -> None:
        self.files, self.seed = files, seed

    def __getitem__(self, key: tuple[tuple[int, int], int]) -> tuple[np.ndarray | None, int, int]:
        position, index = key
        with torch.random.fork_rng(devices=[]):  # without workers this is the training's own process
            set_seed(derive_seed(*self.seed, *position), torch.device("cpu"))
            return self.files[index]


class FileBatches(PixelBatches):
    """Images that `workers` processes read and transform ahead of use.

    A file that does not decode is left out of its batch; each pass warns of new ones.
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
        strict: bool = False,
        **options: Any,
    ) -> None:
        super().__init__([torch.arange(len(split))], batch_size, shuffle_seed, steps, **options)
        self.files, self.workers, self.strict = ImageFiles(split, transform), workers, strict
        self.device = torch.device("cpu")
        self.broken: set[int] = set()

    def to(self, device: torch.device) -> FileBatches:
        self.device = torch.device(device)
        return self

    def __iter__(self) -> Iterator[Batch]:
        first = self.skip
        batches = list(self.remaining_rows())
        keys = ([((b, i), index) for i, index in enumerate(rows.tolist())] for b, rows in enumerate(batches, first))
        loader: Any = torch.utils.data.DataLoader(
            SeededFiles(self.files, "image", self.shuffle_seed, self.epoch, self.rank),  # type: ignore[arg-type]
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=2 if self.workers else None,
            generator=torch.Generator(),  # else the loader draws from the training's generator
        )
        known, files = len(self.broken), self.files.split.files
        for rows, (images, labels, broken) in zip(batches, loader, strict=True):
            self.broken.update(broken)
            if broken and self.strict:
                complain([files[broken[0]]], len(files), strict=True)
            if images is not None:
                batch = tuple(t.to(self.device, non_blocking=True) for t in (images, labels))
                yield self.finish(batch, rows)
        if len(self.broken) > known:
            complain([files[i] for i in sorted(self.broken)], len(files), strict=False)


class ImageModule(TrainingModule):
    """An image classifier in training. Workers have cropped their images; pixels on the device are cropped here."""

    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    model: ImageClassifier

    def __init__(self, model: nn.Module, recipe: ImageRecipe, classes: int) -> None:
        super().__init__(model, recipe)
        self.classes = classes
        self.strength = AUGMENT[recipe.augment]
        self.on_device = recipe.data.cache == "device"

    @torch.no_grad()
    def augment(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and smoothed class probabilities."""
        with torch.autocast(images.device.type, enabled=False):  # coordinates in half precision are off by a pixel
            strength = self.strength
            pixels = augment_pixels(images, self.model.image_size, strength) if self.on_device else images / 255
            pixels = self.model.normalise(pixels)
            if strength.erase:
                pixels = erase(pixels, strength.erase)
            targets = F.one_hot(labels, self.classes) * (1 - strength.smoothing) + strength.smoothing / self.classes
            return mix(pixels, targets, strength)

    def task_loss(self, batch: Batch) -> Tensor:
        images, targets = self.augment(*batch)
        return F.cross_entropy(self.model(images), targets)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        return classification_scores(model(images), labels)


# RandAugment's operations, and their meaning at strength 1: shear as a slope, translation as a part of the side,
# rotation in radians, tones as a change of the factor.
MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
TONES = ("brightness", "contrast", "colour", "sharpness", "posterize", "solarize", "autocontrast")
SHEAR, TRANSLATE, ROTATE, TONE = 0.3, 0.45, math.pi / 6, 0.9
LOG_RATIO = math.log(4 / 3)  # of a crop's sides


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    return low + (high - low) * torch.rand(count, device=device)


def augment_pixels(images: Tensor, size: int, strength: Strength) -> Tensor:
    """uint8 (B, 3, S, S) → (B, 3, size, size) in [0, 1]: crop, flip, and RandAugment.

    The maps of the plane are multiplied, so that the images are sampled once.
    """
    shape, device = (strength.ops, len(images)), images.device
    ops = torch.randint(1 + len(MOVES) + len(TONES), shape, device=device)  # 0: none
    amounts = (strength.magnitude + 0.05 * torch.randn(shape, device=device)).clamp(0, 1)
    signed = amounts * (2.0 * torch.randint(2, shape, device=device) - 1)
    plane = random_crop(len(images), strength.smallest, device)
    for op, amount in zip(ops, signed, strict=True):
        plane = plane @ moves(op, amount)
    pixels = sample(images, plane, size)
    for op, amount, sign in zip(ops, amounts, signed, strict=True):
        pixels = tones(pixels, op - 1 - len(MOVES), amount, sign)
    return pixels


def random_crop(batch: int, smallest: float, device: torch.device) -> Tensor:
    """Maps (B, 3, 3) of the output's plane [−1, 1]² onto a random part of the input's, half of them mirrored."""
    area = uniform(batch, smallest, 1.0, device)
    ratio = uniform(batch, -LOG_RATIO, LOG_RATIO, device).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    plane = torch.zeros(batch, 3, 3, device=device)
    plane[:, 0, 0] = width * (2.0 * torch.randint(2, (batch,), device=device) - 1)
    plane[:, 1, 1] = height
    plane[:, 0, 2] = (1 - width) * uniform(batch, -1, 1, device)
    plane[:, 1, 2] = (1 - height) * uniform(batch, -1, 1, device)
    plane[:, 2, 2] = 1
    return plane


def moves(op: Tensor, amount: Tensor) -> Tensor:
    """The map (B, 3, 3) of each image's operation; the identity where it is not one of MOVES."""
    amounts = {name: torch.where(op == 1 + i, amount, torch.zeros_like(amount)) for i, name in enumerate(MOVES)}
    angle = ROTATE * amounts["rotate"]
    plane = torch.eye(3, device=op.device).repeat(len(op), 1, 1)
    plane[:, 0, 0], plane[:, 1, 1] = angle.cos(), angle.cos()
    plane[:, 0, 1] = SHEAR * amounts["shear_x"] - angle.sin()
    plane[:, 1, 0] = SHEAR * amounts["shear_y"] + angle.sin()
    plane[:, 0, 2], plane[:, 1, 2] = (2 * TRANSLATE * amounts[f"translate_{axis}"] for axis in "xy")
    return plane


def sample(images: Tensor, plane: Tensor, size: int) -> Tensor:
    """Sample uint8 images through maps of the plane; what lies outside is gray."""
    grid = F.affine_grid(plane[:, :2], [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images / 255 - 0.5, grid, padding_mode="zeros", align_corners=False) + 0.5


def tones(pixels: Tensor, op: Tensor, amount: Tensor, signed: Tensor) -> Tensor:
    """Apply each image's operation of TONES; other numbers leave it unchanged."""
    factor, level = (1 + TONE * signed)[:, None, None, None], amount[:, None, None, None]
    red, green, blue = pixels.split(1, dim=1)
    gray = 0.2989 * red + 0.587 * green + 0.114 * blue
    low, high = pixels.amin((-2, -1), keepdim=True), pixels.amax((-2, -1), keepdim=True)
    steps = (2 ** (8 - (4 * level).round())) - 1  # eight bits of a pixel down to four
    changed = {
        "brightness": factor * pixels,
        "contrast": torch.lerp(gray.mean((-2, -1), keepdim=True), pixels, factor),
        "colour": torch.lerp(gray, pixels, factor),
        "sharpness": torch.lerp(F.avg_pool2d(pixels, 3, 1, 1, count_include_pad=False), pixels, factor),
        "posterize": (pixels * steps).round() / steps,
        "solarize": torch.where(pixels >= 1 - level, 1 - pixels, pixels),
        "autocontrast": (pixels - low) / (high - low).clamp(min=1 / 255),
    }
    for number, name in enumerate(TONES):
        pixels = torch.where((op == number)[:, None, None, None], changed[name], pixels)
    return pixels.clamp(0, 1)


def erase(images: Tensor, probability: float) -> Tensor:
    """Replace a rectangle of 2 to 33 % of the area by noise, in some of the normalised images."""
    (batch, _, height, width), device = images.shape, images.device
    area = uniform(batch, 0.02, 1 / 3, device)
    ratio = uniform(batch, math.log(0.3), -math.log(0.3), device).exp()
    hit = torch.rand(batch, device=device) < probability
    h, w = ((area * ratio).sqrt() * height).clamp(max=height), ((area / ratio).sqrt() * width).clamp(max=width)
    return torch.where((hit[:, None, None] & rectangle(h, w, height, width))[:, None], torch.randn_like(images), images)


def rectangle(h: Tensor, w: Tensor, height: int, width: int) -> Tensor:
    """(B, height, width), True inside rectangles of these sides at random positions."""
    inside = []
    for side, full in ((h, height), (w, width)):
        start = ((full - side) * torch.rand_like(side)).floor()
        at = torch.arange(full, device=side.device) + 0.5
        inside.append((at >= start[:, None]) & (at < (start + side)[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]


def mix(images: Tensor, targets: Tensor, strength: Strength) -> tuple[Tensor, Tensor]:
    """Mix the batch and its class probabilities (B, classes) with the reversed batch, by mixup or by cutmix.

    The random numbers, one for the batch, are drawn on the device: a recorded step must draw new ones each time.
    """
    if not (strength.mixup or strength.cutmix):
        return images, targets
    device, (height, width) = images.device, images.shape[-2:]
    cuts = torch.rand(1, device=device) < (0.5 if strength.mixup and strength.cutmix else float(strength.cutmix > 0))
    share = beta(strength.mixup, device)
    mixed = torch.lerp(images.flip(0), images, share)
    part = (1 - beta(strength.cutmix, device)).sqrt()
    inside = rectangle((height * part).round(), (width * part).round(), height, width)
    images = torch.where(cuts, torch.where(inside[:, None], images.flip(0), images), mixed)
    share = torch.where(cuts, 1 - inside.float().mean(), share)
    return images, torch.lerp(targets.flip(0), targets, share)


def beta(concentration: float, device: torch.device) -> Tensor:
    """One draw of β(a, a), (1,)."""
    a = torch.full((1,), concentration or 1.0, device=device)
    return torch.distributions.Beta(a, a, validate_args=False).sample()
