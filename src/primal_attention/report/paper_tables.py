"""The paper's published UEA numbers: the only numbers in a table of ours that are typed by hand.

Chen et al., "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal Representation", NeurIPS 2023.
Each block names the label of its table in the paper's source. Accuracies are per cent on the test set, one number per
cell without a deviation. Baselines go by the names of `make_attention`; "primal" is PrimalFormer, "primal+"
Primal.+Trans.
"""

from __future__ import annotations

SETS = (
    "EthanolConcentration", "FaceDetection", "Handwriting", "Heartbeat", "JapaneseVowels", "PEMS-SF",
    "SelfRegulationSCP1", "SelfRegulationSCP2", "SpokenArabicDigits", "UWaveGestureLibrary",
)  # fmt: skip

MODELS = {
    "softmax": "Transformer",
    "linear": "Linear Transformer",
    "reformer": "Reformer",
    "longformer": "Longformer",
    "performer": "Performer",
    "yoso": "YOSO-E",
    "cosformer": "cosFormer",
    "soft": "SOFT",
    "flow": "Flowformer",
    "primal": "PrimalFormer",
    "primal+": "Primal.+Trans.",
}

ACCURACY_SOURCE = "tab::timeseries"
# One row per set, one column per model, in the order of MODELS.
_ACCURACY = {
    "EthanolConcentration": (32.7, 31.9, 31.9, 32.3, 31.2, 31.2, 32.3, 33.5, 33.8, 33.1, 35.4),
    "FaceDetection": (67.3, 67.0, 68.6, 62.6, 67.0, 67.3, 64.8, 67.1, 67.6, 67.1, 63.8),
    "Handwriting": (32.0, 34.7, 27.4, 39.6, 32.1, 30.9, 28.9, 34.7, 33.8, 29.6, 28.7),
    "Heartbeat": (76.1, 76.6, 77.1, 78.0, 75.6, 76.5, 77.1, 75.6, 77.6, 76.1, 77.1),
    "JapaneseVowels": (98.7, 99.2, 97.8, 98.9, 98.1, 98.6, 98.3, 99.2, 98.9, 98.4, 98.9),
    "PEMS-SF": (82.1, 82.1, 82.7, 83.8, 80.9, 85.2, 83.2, 80.9, 83.8, 89.6, 90.2),
    "SelfRegulationSCP1": (92.2, 92.5, 90.4, 90.1, 91.5, 91.1, 91.1, 91.8, 92.5, 92.5, 92.5),
    "SelfRegulationSCP2": (53.9, 56.7, 56.7, 55.6, 56.7, 53.9, 55.0, 55.6, 56.1, 57.2, 56.1),
    "SpokenArabicDigits": (98.4, 98.0, 97.0, 94.4, 98.4, 98.9, 98.4, 98.8, 98.8, 100.0, 100.0),
    "UWaveGestureLibrary": (85.6, 85.0, 85.6, 87.5, 85.3, 88.4, 85.6, 85.0, 86.6, 86.3, 88.4),
}
ACCURACY = {name: dict(zip(MODELS, row, strict=True)) for name, row in _ACCURACY.items()}
AVERAGE_ACCURACY = dict(zip(MODELS, (71.9, 72.4, 71.5, 72.0, 71.9, 72.2, 71.5, 72.2, 73.0, 73.0, 73.1), strict=True))

EFFICIENCY_SOURCE = "tab::timeseries_efficiency"
EFFICIENCY_DEVICE = "NVIDIA Tesla P100 SXM2 16GB"
# Seconds per epoch, one column per set in the order of SETS.
_SECONDS = {
    "softmax": (4.3, 10.7, 0.3, 0.7, 0.5, 0.6, 1.8, 1.8, 3.7, 0.3),
    "flow": (2.4, 9.8, 0.3, 0.7, 0.6, 0.7, 1.4, 1.3, 4.4, 0.3),
    "primal+": (3.3, 5.7, 0.3, 0.7, 0.5, 0.7, 1.6, 1.6, 4.0, 0.3),
    "primal": (2.3, 6.9, 0.4, 0.4, 0.5, 0.8, 1.4, 1.3, 4.5, 0.4),
}
SECONDS = {model: dict(zip(SETS, row, strict=True)) for model, row in _SECONDS.items()}
AVERAGE_SECONDS = {"softmax": 2.5, "flow": 2.2, "primal+": 1.9, "primal": 1.9}
# Gigabytes, one number for all sets.
MEMORY = {"softmax": 10.9, "flow": 2.8, "primal+": 6.5, "primal": 2.7}

ETA_RANK_SOURCE = "tab::ablation_timeseries"
ETAS = (0.0, 0.1, 0.2, 0.5)
RANKS = (20, 30, 40)
# PrimalFormer: per set one row per rank s in the order of RANKS, one column per η in the order of ETAS.
_ETA_RANK = {
    "EthanolConcentration": ((32.3, 31.6, 30.8, 32.7), (30.0, 33.1, 31.9, 30.4), (30.8, 32.3, 33.1, 31.9)),
    "FaceDetection": ((64.2, 67.1, 66.2, 66.4), (65.0, 65.3, 65.2, 65.7), (64.5, 65.6, 66.5, 66.7)),
    "Handwriting": ((26.7, 28.4, 27.3, 26.9), (28.2, 26.9, 29.6, 25.9), (26.0, 26.5, 27.7, 27.5)),
    "Heartbeat": ((75.1, 72.7, 74.2, 75.1), (75.6, 75.6, 75.6, 76.1), (76.1, 75.1, 72.2, 74.6)),
    "JapaneseVowels": ((98.1, 98.1, 97.3, 97.8), (98.1, 97.6, 97.3, 97.6), (98.1, 98.1, 97.6, 98.4)),
    "PEMS-SF": ((86.1, 85.6, 83.8, 84.4), (83.8, 86.7, 82.1, 86.7), (86.1, 89.6, 86.7, 85.0)),
    "SelfRegulationSCP1": ((91.5, 92.5, 90.8, 91.8), (92.2, 91.8, 92.2, 92.5), (91.8, 91.8, 91.5, 91.8)),
    "SelfRegulationSCP2": ((57.2, 53.9, 55.6, 56.1), (55.6, 53.9, 55.6, 55.8), (52.9, 56.1, 53.9, 53.3)),
    "SpokenArabicDigits": ((100.0, 100.0, 100.0, 100.0),) * 3,
    "UWaveGestureLibrary": ((86.3, 83.8, 83.8, 84.7), (85.3, 85.0, 85.0, 84.1), (86.3, 84.1, 84.1, 85.9)),
}
ETA_RANK = {
    name: {(s, eta): value for s, row in zip(RANKS, rows, strict=True) for eta, value in zip(ETAS, row, strict=True)}
    for name, rows in _ETA_RANK.items()
}

DATA_DEPENDENCE_SOURCE = "tab::ablation_weights_time"
# Primal.+Trans., one column per set in the order of SETS.
_DATA_DEPENDENCE = {
    False: (34.6, 63.5, 29.3, 76.1, 99.2, 88.4, 92.8, 58.3, 100.0, 87.2),
    True: (35.4, 63.8, 28.7, 77.1, 98.9, 90.2, 92.5, 56.1, 100.0, 88.4),
}
DATA_DEPENDENCE = {dependent: dict(zip(SETS, row, strict=True)) for dependent, row in _DATA_DEPENDENCE.items()}
