"""Augmentation of whole batches of images on the device that trains: DeiT's set of random changes.

    crop and flip, RandAugment (Cubuk et al., 2020), random erasing (Zhong et al., 2020),
    mixup (Zhang et al., 2018) and cutmix (Yun et al., 2019), smoothed labels

Every image of a batch has draws of its own. Moves of the plane are multiplied into one map and sampled once. Draws come
from torch's global generators, which each epoch seeds anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
