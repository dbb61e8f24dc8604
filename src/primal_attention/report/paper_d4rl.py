"""The paper's published numbers on D4RL, typed by hand.

Chen et al., "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal Representation", NeurIPS 2023.
Each block names the label of its table in the paper's source. Baselines go by the names of `make_attention`; "softmax"
is Decision Transformer, "primal+" Primal.+DT.
"""

from __future__ import annotations

MODELS = {
    "softmax": "DT",
    "linear": "Linear Transformer",
    "reformer": "Reformer",
    "performer": "Performer",
    "cosformer": "cosFormer",
    "flow": "Flowformer",
    "primal+": "Primal.+DT",
}

SCORE_SOURCE = "tab::rl"
# Normalised score, mean and deviation over three seeds; one column per model in the order of MODELS.
_SCORES = {
    "halfcheetah-medium-expert": (
        (83.8, 3.3), (78.2, 3.2), (81.5, 1.6), (85.1, 2.1), (85.5, 2.9), (90.8, 0.4), (77.8, 22.1),
    ),
    "hopper-medium-expert": (
        (104.0, 2.5), (107.2, 0.9), (104.2, 9.8), (93.5, 13.9), (98.1, 7.4), (109.9, 1.0), (111.5, 0.2),
    ),
    "walker2d-medium-expert": (
        (107.7, 0.6), (67.2, 27.3), (71.4, 1.8), (72.6, 2.4), (100.5, 14.5), (108.0, 0.4), (108.9, 0.1),
    ),
    "halfcheetah-medium": ((42.4, 0.1), (42.3, 0.2), (42.2, 0.1), (42.1, 0.2), (42.1, 0.3), (42.2, 0.2), (43.0, 0.0)),
    "hopper-medium": ((64.2, 1.1), (58.7, 0.4), (59.9, 0.7), (59.7, 7.5), (59.8, 3.8), (66.9, 2.5), (74.5, 0.6)),
    "walker2d-medium": ((70.6, 3.2), (57.9, 10.6), (65.8, 4.9), (63.3, 10.7), (71.4, 1.2), (71.7, 2.5), (77.9, 7.8)),
    "halfcheetah-medium-replay": (
        (34.6, 0.6), (32.1, 1.5), (33.6, 0.7), (31.7, 0.9), (32.8, 3.6), (34.7, 1.5), (38.9, 0.4),
    ),
    "hopper-medium-replay": (
        (79.7, 7.4), (74.3, 7.0), (66.1, 2.6), (64.6, 24.2), (59.3, 16.5), (75.5, 14.5), (88.5, 12.5),
    ),
    "walker2d-medium-replay": (
        (62.9, 5.0), (62.1, 7.4), (50.1, 3.5), (61.3, 6.7), (60.5, 9.9), (62.0, 3.1), (76.8, 10.3),
    ),
}  # fmt: skip
SCORES = {name: dict(zip(MODELS, row, strict=True)) for name, row in _SCORES.items()}
SETS = tuple(SCORES)
AVERAGE_SCORE = dict(zip(MODELS, (72.2, 64.4, 63.9, 63.8, 67.8, 73.5, 77.5), strict=True))

EFFICIENCY_SOURCE = "tab::rl:efficiency"
EFFICIENCY_DEVICE = "NVIDIA Tesla P100 SXM2 16GB"
# Seconds per 1000 steps by level, and gigabytes.
SECONDS = {
    "softmax": {"medium-expert": 20.8, "medium": 20.8, "medium-replay": 20.8},
    "flow": {"medium-expert": 54.4, "medium": 54.4, "medium-replay": 54.3},
    "primal+": {"medium-expert": 23.5, "medium": 23.4, "medium-replay": 23.3},
}
MEMORY = {"softmax": 0.3, "flow": 1.5, "primal+": 0.3}
