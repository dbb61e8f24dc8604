"""Augmentation of whole batches of images on the device that trains: DeiT's set of random changes.

    crop and flip, RandAugment (Cubuk et al., 2020), random erasing (Zhong et al., 2020),
    mixup (Zhang et al., 2018) and cutmix (Yun et al., 2019), smoothed labels

Every image of a batch has draws of its own. Moves of the plane are multiplied into one map and sampled once. Draws come
from torch's global generators, which each epoch seeds anew.

Batches of images: from files through worker processes, or from pixels that lie on the device already.

Both give uint8 images (B, 3, S, S) and labels (B,), in an order that depends on the seed and the epoch alone. What
workers draw for an image follows from these and its place in the epoch: an epoch may begin anywhere, with any workers.

Training of image classifiers: cross-entropy with mixed and smoothed labels, and J squared after the batch's mean.

A batch is (uint8 images (B, 3, S, S), labels (B,)). Images that are larger than the model's are cut on the device;
those that workers have cut already only wait for erasing and mixing.

Image classification: DeiT-Small/16 with Primal-Attention in its last layer, trained the way DeiT was.

primal train image/deit-small --data.folder data/imagenet                              ImageNet-1K
primal train image/deit-small --data.folder data/imagenet --data.classes in100.txt     ImageNet-100
primal train image/imagenette --model.attention softmax                                the baseline, a small set
primal table image                                                                     all three models, three seeds

One training holds a tenth of the training images out. Its three readings are the last epoch, the epoch that the
held-out images choose, and, apart, the best epoch on test, which is no fair number.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.data import image as image_crops
from primal_attention.data.image import ImageData, ImageFiles, ImageSplit, collate, complain, decode_once, whole_side
from primal_attention.data.uea import stratified_holdout
from primal_attention.models.image import ImageClassifier
from primal_attention.train.batches import Batches, derive_seed, set_seed
from primal_attention.train.config import OptimConfig, Recipe, TrainerConfig, require
from primal_attention.train.task import Batch, TrainingModule

if TYPE_CHECKING:
    from primal_attention.train.task import Experiment


MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
TONES = ("brightness", "contrast", "colour", "sharpness", "posterize", "solarize", "autocontrast")
RATIO = (3 / 4, 4 / 3)
# What strength 1 means, as in RandAugment: shear as a slope, translation as a part of the side, rotation in radians.
SHEAR, TRANSLATE, ROTATE, TONE = 0.3, 0.45, math.pi / 6, 0.9


@dataclass(frozen=True)
class Strength:
    """How much is done to the training images."""

    smallest: float = 0.08
    """Least part of an image's area that a crop keeps."""
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
    """How often an image stands in a batch, with draws of its own each time; an epoch keeps its length."""


AUGMENT = {
    "none": Strength(),
    "light": Strength(smallest=0.35, ops=1, magnitude=0.5, cutmix=1.0, smoothing=0.1),
    "deit": Strength(ops=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3),
}


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    return low + (high - low) * torch.rand(count, device=device)


def augment_pixels(images: Tensor, size: int, how: Strength) -> Tensor:
    """uint8 (B, 3, S, S) → (B, 3, size, size) in [0, 1]: crop, flip, and RandAugment's moves and tones."""
    batch, device = images.shape[0], images.device
    kinds = torch.randint(1 + len(MOVES) + len(TONES), (how.ops, batch), device=device)  # 0: nothing
    amounts = (how.magnitude + 0.05 * torch.randn(how.ops, batch, device=device)).clamp(0, 1)
    signed = amounts * (2.0 * torch.randint(2, (how.ops, batch), device=device) - 1)
    plane = random_crop(batch, how.smallest, device)
    for kind, amount in zip(kinds, signed, strict=True):
        plane = plane @ moves(kind, amount)
    pixels = sample(images, plane, size)
    for kind, amount, sign in zip(kinds, amounts, signed, strict=True):
        pixels = tones(pixels, kind - 1 - len(MOVES), amount, sign)
    return pixels


def random_crop(batch: int, smallest: float, device: torch.device) -> Tensor:
    """Maps (B, 3, 3) of the output's plane [−1, 1]² onto a random part of the input's, mirrored for half of them."""
    area = uniform(batch, smallest, 1.0, device)
    ratio = uniform(batch, math.log(RATIO[0]), math.log(RATIO[1]), device).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    plane = torch.zeros(batch, 3, 3, device=device)
    plane[:, 0, 0] = width * (2.0 * torch.randint(2, (batch,), device=device) - 1)
    plane[:, 1, 1] = height
    plane[:, 0, 2] = (1 - width) * uniform(batch, -1, 1, device)
    plane[:, 1, 2] = (1 - height) * uniform(batch, -1, 1, device)
    plane[:, 2, 2] = 1
    return plane


def moves(kind: Tensor, amount: Tensor) -> Tensor:
    """The map (B, 3, 3) of each image's operation; the identity where it is a tone."""

    def of(name: str) -> Tensor:
        return torch.where(kind == 1 + MOVES.index(name), amount, torch.zeros_like(amount))

    angle = ROTATE * of("rotate")
    plane = torch.eye(3, device=kind.device).repeat(len(kind), 1, 1)
    plane[:, 0, 0], plane[:, 1, 1] = angle.cos(), angle.cos()
    plane[:, 0, 1] = SHEAR * of("shear_x") - angle.sin()
    plane[:, 1, 0] = SHEAR * of("shear_y") + angle.sin()
    plane[:, 0, 2], plane[:, 1, 2] = 2 * TRANSLATE * of("translate_x"), 2 * TRANSLATE * of("translate_y")
    return plane


def sample(images: Tensor, plane: Tensor, size: int) -> Tensor:
    grid = F.affine_grid(plane[:, :2], [len(images), 3, size, size], align_corners=False)
    # What lies outside is gray: shifted by its level, zeros stand for it.
    return F.grid_sample(images / 255 - 0.5, grid, padding_mode="zeros", align_corners=False) + 0.5


def tones(pixels: Tensor, kind: Tensor, amount: Tensor, signed: Tensor) -> Tensor:
    """Each image after its operation of TONES; negative and larger kinds leave it alone."""
    factor = (1 + TONE * signed)[:, None, None, None]
    level = amount[:, None, None, None]
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
        pixels = torch.where((kind == number)[:, None, None, None], changed[name], pixels)
    return pixels.clamp(0, 1)


def erase(images: Tensor, probability: float) -> Tensor:
    """A rectangle of 2 to 33 % of the area replaced by noise, in some of the normalised images."""
    batch, _, height, width = images.shape
    device = images.device
    area = uniform(batch, 0.02, 1 / 3, device)
    ratio = uniform(batch, math.log(0.3), math.log(1 / 0.3), device).exp()
    hit = torch.rand(batch, device=device) < probability
    h, w = ((area * ratio).sqrt() * height).clamp(max=height), ((area / ratio).sqrt() * width).clamp(max=width)
    inside = rectangle((h, w), (torch.rand(batch, device=device), torch.rand(batch, device=device)), height, width)
    return torch.where(hit[:, None, None, None] & inside[:, None], torch.randn_like(images), images)


def rectangle(sides: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], height: int, width: int) -> Tensor:
    """(B, height, width), True inside rectangles of these sides; places in [0, 1) say where in the room left over."""
    inside = []
    for side, place, whole in zip(sides, places, (height, width), strict=True):
        start = ((whole - side) * place).floor()
        at = torch.arange(whole, device=side.device) + 0.5
        inside.append((at >= start[:, None]) & (at < (start + side)[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]


def mix(images: Tensor, targets: Tensor, how: Strength) -> tuple[Tensor, Tensor]:
    """The batch mixed with its reverse by mixup or by cutmix, and their class probabilities (B, classes) alike.

    The draws, one for the batch, stay on the device: a step that is recorded there must draw anew each time.
    """
    if not (how.mixup or how.cutmix):
        return images, targets
    device, (height, width) = images.device, images.shape[-2:]
    cuts = torch.rand(1, device=device) < (0.5 if how.mixup and how.cutmix else float(how.cutmix > 0))
    share = beta(how.mixup, device)
    mixed = torch.lerp(images.flip(0), images, share)
    part = (1 - beta(how.cutmix, device)).sqrt()
    sides = ((height * part).round(), (width * part).round())
    places = (torch.rand(1, device=device), torch.rand(1, device=device))
    inside = rectangle(sides, places, height, width)
    images = torch.where(cuts, torch.where(inside[:, None], images.flip(0), images), mixed)
    share = torch.where(cuts, 1 - inside.float().mean(), share)
    return images, torch.lerp(targets.flip(0), targets, share)


def beta(concentration: float, device: torch.device) -> Tensor:
    """One draw of β(a, a), (1,)."""
    a = torch.full((1,), concentration or 1.0, device=device)
    return torch.distributions.Beta(a, a, validate_args=False).sample()


def smooth(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Class probabilities (B, classes): smoothing spreads that much of each over all classes."""
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


Place = tuple[int, int]  # of an image in an epoch: its batch, and where in the batch
NOBODY = -1  # the label of a row that only fills a batch up


class PixelBatches(Batches):
    """Decoded images, kept whole on the device.

    repeats: how often an image follows itself in a pass, which has as many images as without (repeated augmentation).
    fill: make the last batch as long as the others with rows that no score counts, so that one shape is compiled.
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
        return super().order(turn).repeat_interleave(self.repeats)[: self.cases]

    def __iter__(self) -> Iterator[Any]:
        for turn in super().__iter__():
            yield [self.filled(*batch) for batch in turn] if isinstance(turn, list) else self.filled(*turn)

    def filled(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        short = self.batch_size - len(labels)
        if not self.fill or short <= 0:
            return images, labels
        more = images[:1].expand(short, *images.shape[1:])
        return torch.cat([images, more]), torch.cat([labels, labels.new_full((short,), NOBODY)])


class SeededFiles:
    """Images by (place in an epoch, number): the place decides the draws, whatever the worker drew before.

    name: what a seed is derived from, besides the place.
    """

    def __init__(self, files: ImageFiles, *name: object) -> None:
        self.files, self.name = files, name

    def __getitem__(self, which: tuple[Place, int]) -> tuple[np.ndarray | None, int, int]:
        place, number = which
        with torch.random.fork_rng(devices=[]):  # without workers this is the training's own process
            set_seed(derive_seed(*self.name, *place), torch.device("cpu"))
            return self.files[number]


class FileBatches(PixelBatches):
    """Images that are read, cut and augmented by `workers` processes, some batches ahead of use.

    A file that does not decode is left out of its batch; each pass names the first new one and says how many there are.
    """

    def __init__(
        self,
        split: ImageSplit,
        transform: Callable[[Any], np.ndarray],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        repeats: int = 1,
        fill: bool = False,
        workers: int = 0,
        strict: bool = False,
    ) -> None:
        numbers = torch.arange(len(split))
        super().__init__([numbers, numbers], batch_size, shuffle_seed, steps, repeats=repeats, fill=fill)
        self.files, self.workers, self.strict = ImageFiles(split, transform), workers, strict
        self.device = torch.device("cpu")
        self.broken: set[int] = set()

    def to(self, device: torch.device) -> FileBatches:
        self.device = torch.device(device)
        return self

    def __iter__(self) -> Iterator[Any]:
        first = self.skip * self.group
        turns = [turn if isinstance(turn, list) else [turn] for turn in Batches.__iter__(self)]
        read = self.read([numbers.tolist() for turn in turns for numbers, _ in turn], first)
        if self.group == 1:
            yield from read
            return
        while together := list(islice(read, self.group)):
            yield together

    def read(self, rows: list[list[int]], first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of these cases; `first` is the first one's number in its epoch."""
        places = ([((b, i), number) for i, number in enumerate(batch)] for b, batch in enumerate(rows, first))
        loader: Any = torch.utils.data.DataLoader(
            SeededFiles(self.files, "image", self.shuffle_seed, self.epoch, self.rank),  # type: ignore[arg-type]
            batch_sampler=places,
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=2 if self.workers else None,
            generator=torch.Generator(),  # else it would use up one of the training's numbers
        )
        known = len(self.broken)
        for images, labels, broken in loader:
            self.broken.update(broken)
            if broken and self.strict:
                complain([self.files.split.files[broken[0]]], len(self.files), strict=True)
            if images is None:
                continue
            yield self.filled(images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
        if len(self.broken) > known:
            complain([self.files.split.files[i] for i in sorted(self.broken)], len(self.files), strict=False)


def pixel_batches(recipe: ImageRecipe, data: ImageData) -> tuple[PixelBatches, PixelBatches, PixelBatches]:
    """Training, validation and test batches of a set that is decoded once and kept on the device."""
    side, strict = whole_side(recipe.data.size), recipe.data.strict
    pixels, labels = decode_once(data.folder, f"train-{side}", data.train, side, strict=strict)
    kept, held = stratified_holdout(labels, recipe.data.holdout, recipe.seed)
    test = decode_once(data.folder, f"test-{side}", data.test, side, strict=strict)
    halves = ((pixels[kept], labels[kept]), (pixels[held], labels[held]), test)
    tensors = [tuple(torch.from_numpy(array) for array in half) for half in halves]
    how = _training(recipe, len(kept))
    train = PixelBatches(tensors[0], **how)
    val, tested = (PixelBatches(half, recipe.trainer.batch_size, fill=True) for half in tensors[1:])
    return train, val, tested


def file_batches(recipe: ImageRecipe, data: ImageData) -> tuple[PixelBatches, PixelBatches, PixelBatches]:
    """Training, validation and test batches that workers read from files."""
    strength, size = AUGMENT[recipe.augment], recipe.data.size
    kept, held = stratified_holdout(data.train.labels, recipe.data.holdout, recipe.seed)
    reading: dict[str, Any] = {"workers": recipe.data.workers, "strict": recipe.data.strict}
    crop = image_crops.training(size, smallest=strength.smallest, ops=strength.ops, magnitude=strength.magnitude)
    train = FileBatches(data.train.take(kept), crop, **_training(recipe, len(kept)), **reading)
    val, test = (
        FileBatches(split, image_crops.evaluation(size), recipe.trainer.batch_size, fill=True, **reading)
        for split in (data.train.take(held), data.test)
    )
    return train, val, test


def _training(recipe: ImageRecipe, cases: int) -> dict[str, Any]:
    size = recipe.trainer.batch_size
    return {
        "batch_size": size,
        "shuffle_seed": recipe.seed,
        # Whole batches only, as DeiT's; a set smaller than a batch is one.
        "steps": recipe.trainer.steps_per_epoch or max(1, cases // size),
        "repeats": AUGMENT[recipe.augment].repeats,
    }


class ImageModule(TrainingModule):
    """An image classifier in training."""

    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    model: ImageClassifier

    def __init__(self, model: nn.Module, recipe: ImageRecipe, classes: int) -> None:
        super().__init__(model, recipe)
        self.classes = classes
        self.strength = AUGMENT[recipe.augment]
        self.on_device = recipe.data.cache == "device"

    @torch.no_grad()
    def augment(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and class probabilities, as the loss wants them."""
        with torch.autocast(images.device.type, enabled=False):  # positions in half precision are off by a pixel
            size = self.model.image_size
            pixels = augment_pixels(images, size, self.strength) if self.on_device else images / 255
            pixels = self.model.normalise(pixels)
            if self.strength.erase:
                pixels = erase(pixels, self.strength.erase)
            return mix(pixels, smooth(labels, self.classes, self.strength.smoothing), self.strength)

    def task_loss(self, batch: Batch) -> Tensor:
        images, targets = self.augment(*batch)
        return F.cross_entropy(self.model(images), targets)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images).float()
        return {
            "accuracy": (logits.argmax(dim=-1) == labels).sum(),
            "loss": F.cross_entropy(logits, labels, ignore_index=NOBODY, reduction="sum"),
            "cases": (labels != NOBODY).sum(),
        }


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
    """The network; see primal_attention.models.image."""

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
        from primal_attention.data import image as images

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
    from primal_attention.models.image import deit

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
    from primal_attention.train.task import Experiment

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
