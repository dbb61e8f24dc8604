"""PrimalClassifier: the recipe `uea-modern` as an aeon and scikit-learn classifier.

from primal_attention import PrimalClassifier
model = PrimalClassifier(random_state=0).fit(X, y)      # X (samples, channels, time), or a list of (channels, time)
model.predict(X_new); model.predict_proba(X_new)
model.save("model.safetensors"); PrimalClassifier.load("model.safetensors")
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from aeon.classification.base import BaseClassifier
from sklearn.utils import check_random_state

from primal_attention.data.uea import PrincipalChannels, SeriesData, Split, Standardizer, interpolate_missing, pad
from primal_attention.train import distributed, loop
from primal_attention.train.batches import Batches, derive_seed
from primal_attention.train.checkpoint import read_weights
from primal_attention.train.config import from_plain, to_plain
from primal_attention.train.uea import AugmentConfig, ClassifierConfig, UEARecipe, build_from, make_model, modern_recipe
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import COUNT, check, write_atomically

FORMAT = 2
SAVED = {
    "parameters": dict,
    "network": dict,
    "classes": list,
    "classes_dtype": str,
    "n_channels": COUNT,
    "max_length": COUNT,
}
T = TypeVar("T")
EVALUATED_SAMPLES = 256  # in one batch


class PrimalClassifier(BaseClassifier):
    """Time-series classifier: a Transformer with Primal-Attention in every layer, trained with the KSVD objective.

    Series may have any number of channels, unequal lengths and missing values (interpolated along time). Channels are
    standardised by the training samples.

    Parameters
    ----------
    epochs : int, default=100
        The recipe `uea-modern` trains for 400; a quarter is enough for most data sets.
    batch_size : int, default=32
    learning_rate : float, default=1e-3
        Peak of the one-cycle schedule.
    attention : str, default="primal"
        Attention of all layers; "primal+" puts Primal-Attention in the last layer only. See `make_attention`.
    embed_dim, num_heads, layers : int
        Width, heads and depth of the network.
    rank, landmarks : int
        Directions of Primal-Attention, and rows of the input that its weights are built from.
    dropout : float, default=0.2
    eta : float, default=0.1
        Weight of the KSVD loss.
    augment : bool, default=True
        Warp, scale and mix the training series at random.
    early_stop : int or None, default=None
        Hold out `validation_fraction` of the samples and stop after this many epochs without a better score on them.
        The classifier has the weights of the best epoch. None trains on all samples for all epochs.
    validation_fraction : float, default=0.2
    device : str, default="auto"
        "auto", "cpu" or "gpu".
    verbose : bool, default=False
        Show a progress bar.
    random_state : int, RandomState instance or None, default=None

    Attributes
    ----------
    classes_ : array of the class labels
    n_classes_, n_channels_ : int
    network_ : ClassifierConfig
        The trained network.
    history_ : list of dict
        One row of losses per epoch.

    References
    ----------
    Y. Chen, Q. Tao, F. Tonin, J. Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
    Representation", NeurIPS 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention import PrimalClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((20, 2, 15))
    >>> X[10:] += 3
    >>> y = np.repeat(["low", "high"], 10)
    >>> PrimalClassifier(epochs=5, embed_dim=16, num_heads=2, rank=4, random_state=0).fit(X, y).predict(X[:1]).shape
    (1,)
    """

    _tags = {  # noqa: RUF012 (aeon reads a plain dict)
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "capability:missing_values": True,
        "X_inner_type": ["np-list", "numpy3D"],
        "algorithm_type": "deeplearning",
        "python_dependencies": ["torch", "lightning"],
    }

    def __init__(
        self,
        *,
        epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 1e-3,
        attention: str = "primal",
        embed_dim: int = 128,
        num_heads: int = 8,
        layers: int = 3,
        rank: int = 16,
        landmarks: int = 64,
        dropout: float = 0.2,
        eta: float = 0.1,
        augment: bool = True,
        early_stop: int | None = None,
        validation_fraction: float = 0.2,
        device: str = "auto",
        verbose: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.attention = attention
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.layers = layers
        self.rank = rank
        self.landmarks = landmarks
        self.dropout = dropout
        self.eta = eta
        self.augment = augment
        self.early_stop = early_stop
        self.validation_fraction = validation_fraction
        self.device = device
        self.verbose = verbose
        self.random_state = random_state
        super().__init__()

    def recipe(self, seed: int = 0) -> UEARecipe:
        """The training recipe that the parameters describe."""
        base = modern_recipe("fit")
        shared: dict[str, Any] = {
            name: getattr(self, name) for name in ("embed_dim", "num_heads", "layers", "rank", "landmarks", "dropout")
        }
        accelerator: Any = self.device
        return replace(
            base,
            seed=seed,
            eta=self.eta,
            protocol="validation" if self.early_stop else "last",
            data=replace(base.data, holdout=self.validation_fraction),
            model=replace(base.model, attention=(self.attention,), ffn_dim=4 * self.embed_dim, **shared),
            augment=base.augment if self.augment else AugmentConfig(label_smoothing=base.augment.label_smoothing),
            optim=replace(base.optim, lr=self.learning_rate),
            trainer=replace(
                base.trainer,
                epochs=self.epochs,
                batch_size=self.batch_size,
                early_stop=self.early_stop or 0,
                accelerator=accelerator,
                progress=self.verbose,
            ),
        )

    def _fit(self, X: Sequence[np.ndarray], y: np.ndarray) -> PrimalClassifier:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        recipe = _checked(self.recipe, seed)
        labels = np.array([self._class_dictionary[label] for label in y], dtype=np.int64)
        split = Split(to_series(X), labels)
        data = SeriesData("fit", split, split.take(np.arange(0)), tuple(map(str, self.classes_)))
        # The result does not depend on the caller's random generator, and leaves it unchanged.
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed("weights", seed))
            experiment = _checked(build_from, recipe, data)
            if experiment.select is None:
                experiment.watched = {}  # there is no test set
            training = loop.Training(recipe, experiment, title="PrimalClassifier")
            training.fit()
        state = training.state.chosen or experiment.module.final_model.state_dict()
        self.network_ = recipe.model
        self.n_channels_, self.max_length_ = data.channels, data.max_length
        assert experiment.standardizer is not None
        self.standard_ = experiment.standardizer
        self.weights_ = {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}
        self.history_ = training.state.rows
        return self

    def _predict(self, X: Sequence[np.ndarray]) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(axis=1)]

    def _predict_proba(self, X: Sequence[np.ndarray]) -> np.ndarray:
        series = to_series(X)
        if series[0].shape[1] != self.n_channels_:
            raise ValueError(f"X has {series[0].shape[1]} channels, the classifier was fitted on {self.n_channels_}")
        values, mask = pad([self.standard_(s) for s in series], length=self.max_length_, clip=False)
        with torch.random.fork_rng():
            model = make_model(self.network_, values.shape[-1], self.n_classes_, self.max_length_)
        model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in self.weights_.items()})
        where = distributed.pick_device(self.recipe().trainer)
        model.to(where).eval()
        batches = Batches([torch.from_numpy(array) for array in (values, mask)], EVALUATED_SAMPLES).to(where)
        with torch.no_grad():
            parts = [model(x, padding).double().softmax(dim=-1).cpu() for x, padding in batches]
        return torch.cat(parts).numpy()

    def save(self, file: str | Path) -> Path:
        """Write the fitted classifier to one safetensors file: arrays and a description, no code.

        Args:
            file: path of the file.
        """
        from safetensors.numpy import save

        self._check_is_fitted()
        parameters = self.get_params()
        if not isinstance(parameters["random_state"], (int, type(None))):
            parameters["random_state"] = None
        about = {
            "format": FORMAT,
            "kind": "PrimalClassifier",
            "parameters": parameters,
            "network": to_plain(self.network_),
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "n_channels": self.n_channels_,
            "max_length": self.max_length_,
        }
        arrays = {f"weights/{name}": array for name, array in self.weights_.items()}
        arrays |= vars(self.standard_)  # mean, std, and the basis of principal channels
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        content = save(arrays, metadata={"primal_attention": json.dumps(about)})
        write_atomically(Path(file), lambda out: out.write(content))
        return Path(file)

    @classmethod
    def load(cls, file: str | Path) -> PrimalClassifier:
        """Read a classifier that `save` wrote; nothing in the file is executed.

        Args:
            file: path of the file.
        """
        return _checked(cls._load, Path(file))

    @classmethod
    def _load(cls, file: Path) -> PrimalClassifier:
        from safetensors import safe_open

        arrays = {name: t.numpy() for name, t in read_weights(file).items()}
        with safe_open(file, "np") as opened:
            about = json.loads((opened.metadata() or {}).get("primal_attention", "{}"))
        if about.get("kind") != "PrimalClassifier" or about.get("format") != FORMAT:
            raise RunError(f"{file} is not a PrimalClassifier of format {FORMAT} (got format {about.get('format')})")
        check(about, SAVED, file)
        check(arrays, {"mean": ..., "std": ...}, file)
        known = inspect.signature(cls.__init__).parameters
        self = cls(**{name: value for name, value in about["parameters"].items() if name in known})
        self.network_ = from_plain(ClassifierConfig, about["network"], f"{file}: network.")
        self.classes_ = np.array(about["classes"], dtype=about["classes_dtype"])
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {label: i for i, label in enumerate(self.classes_)}
        self.n_channels_, self.max_length_ = about["n_channels"], about["max_length"]
        mean, std, basis = arrays.pop("mean"), arrays.pop("std"), arrays.pop("basis", None)
        self.standard_ = Standardizer(mean, std) if basis is None else PrincipalChannels(mean, std, basis)
        self.weights_ = {name.removeprefix("weights/"): array for name, array in arrays.items()}
        self.history_ = []
        self.is_fitted = True
        return self

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        return {
            "epochs": 2,
            "embed_dim": 8,
            "num_heads": 2,
            "layers": 1,
            "rank": 3,
            "landmarks": 4,
            "device": "cpu",
        }


def _checked(function: Callable[..., T], *args: Any) -> T:
    """Call a function; its errors become ValueErrors, as callers of an estimator expect."""
    try:
        return function(*args)
    except RunError as error:
        raise ValueError(str(error)) from error


def to_series(X: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Samples of (channels, time) to series of (time, channels) without gaps."""
    series = [interpolate_missing(np.asarray(sample, dtype=np.float64).T) for sample in X]
    if not any(np.isfinite(s).any() for s in series):
        raise DataError("X has no value that is a finite number")
    return series
