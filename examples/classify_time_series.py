"""Classify your own time series: fit, probabilities, uncertainty, save and load.

    pip install -e '.[timeseries]'
    python examples/classify_time_series.py

Replace `make_series` by your data: three channels, series of different lengths, some values missing. The same arrays in
an .npz file train from the command line; the script writes mine.npz. PRIMAL_SMALL=1 trains smaller networks for fewer
epochs.
"""

# %%
from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from primal_attention import PrimalClassifier

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
SAMPLES, EPOCHS, WIDTH = (30, 8, 16) if SMALL else (150, 30, 32)

# %% [markdown]
# ## The data
# A series is an array (channels, time). A list of them may have different lengths; NaN marks missing values, which are
# interpolated along time. With equal lengths, one array (samples, channels, time) works too.


# %%
def make_series(count: int, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Three noisy channels with one bump each; the order of the bumps is the class."""
    orders = {"rising": (0.2, 0.5, 0.8), "falling": (0.8, 0.5, 0.2), "together": (0.5, 0.5, 0.5)}
    labels = rng.choice(list(orders), size=count)
    series = []
    for label in labels:
        length = int(rng.integers(40, 80))
        time = np.linspace(0, 1, length)
        centre = np.array(orders[label]) + rng.normal(scale=0.05, size=3)
        x = np.exp(-((time - centre[:, None]) ** 2) / 0.01) + rng.normal(scale=0.3, size=(3, length))
        x[rng.random(x.shape) < 0.02] = np.nan
        series.append(x)
    return series, labels


rng = np.random.default_rng(0)
X_train, y_train = make_series(SAMPLES, rng)
X_test, y_test = make_series(SAMPLES, rng)
print(f"{len(X_train)} series of {len(X_train[0])} channels, {min(x.shape[1] for x in X_train)} to "
      f"{max(x.shape[1] for x in X_train)} time steps")  # fmt: skip

# %% [markdown]
# ## Fit and predict
# `PrimalClassifier` follows scikit-learn and aeon: it works in their pipelines and searches. It combines networks with
# Primal-Attention and a ridge classifier over random convolutions. Held-out predictions choose their weights.

# %%
size = {"embed_dim": WIDTH, "num_heads": 4, "layers": 2, "rank": 4, "landmarks": 16}
classifier = PrimalClassifier(epochs=EPOCHS, random_state=0, device="cpu", **size)
classifier.fit(X_train, y_train)
print(f"accuracy on new series: {classifier.score(X_test, y_test):.3f}")
print("weights:", {part: round(weight, 2) for part, weight in classifier.combination_.items()})
for name, share in zip(classifier.classes_, classifier.predict_proba(X_test[:1])[0], strict=True):
    print(f"  {name:9s} {share:.3f}")

# %% [markdown]
# ## Uncertainty
# The uncertainty of noise, which belongs to no class, is larger than that of series like the training samples.

# %%
noise = [rng.normal(size=(3, 60)) for _ in range(20)]
for name, series in {"test series": X_test, "noise": noise}.items():
    print(f"mean uncertainty of {name}: {classifier.predict_uncertainty(series).mean():.2f}")

# %% [markdown]
# ## Save and load
# The file has arrays and a description, and loading executes no code.

# %%
folder = Path(tempfile.mkdtemp())
classifier.save(folder / "model.safetensors")
again = PrimalClassifier.load(folder / "model.safetensors")
assert (again.predict(X_test) == classifier.predict(X_test)).all()

# %% [markdown]
# ## The same from the command line
# An .npz file has `X`, (samples, channels, time) with NaN after the end of shorter series, and `y`. The printed command
# trains one network on the file that this cell writes.

# %%
longest = max(x.shape[1] for x in X_train)
padded = np.full((len(X_train), 3, longest), np.nan)
for row, x in zip(padded, X_train, strict=True):
    row[:, : x.shape[1]] = x
np.savez("mine.npz", X=padded, y=y_train)
print("primal train uea-modern --data.file mine.npz --trainer.epochs 50")
