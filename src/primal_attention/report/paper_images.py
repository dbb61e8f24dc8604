"""The paper's published numbers on ImageNet, typed by hand from its source (see `paper_tables`)."""

from __future__ import annotations

SOURCE = "tab::imagenet"
DEVICE = "one Tesla V100, batch 256"
TITLES = {"softmax": "DeiT-Small (softmax)", "primal+": "Primal.+DeiT-Small (primal+)", "primal": "all Primal (primal)"}
COLUMNS = ("ImageNet-100", "ImageNet-1K", "s/1K steps", "GB")
TABLE = {
    "DeiT-Small/16": (74.2, 79.8, 2425.5, 14.2),
    "Primal.+DeiT-Small/16": (75.7, 79.8, 2330.2, 14.0),
}
