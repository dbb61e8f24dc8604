"""PrimalClassifier: Primal-Attention networks and random-convolution features as an aeon and scikit-learn classifier.

from primal_attention import PrimalClassifier
model = PrimalClassifier(random_state=0).fit(X, y)      # X (samples, channels, time), or a list of (channels, time)
model.predict(X_new); model.predict_proba(X_new); model.predict_uncertainty(X_new)
model.save("model.safetensors"); PrimalClassifier.load("model.safetensors")

    networks    trained on all folds but one each; their mean log-probabilities
    ridge       on MultiRocket and Hydra features
    result      softmax(a · networks + b · ridge), with a, b from the predictions for held-out training samples
"""

from __future__ import annotations

import inspect
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from aeon.classification.base import BaseClassifier
from scipy.special import softmax
from scipy.stats import entropy
from sklearn.utils import check_random_state

from primal_attention.data.uea import CompressedChannels, PrincipalChannels, folds, interpolate_missing, pad
from primal_attention.models.convolution_features import ConvolutionFeatures, RidgeHead, fit_weights
from primal_attention.models.uea import ScorePosterior, pooled_scores
from primal_attention.train import distributed, loop
from primal_attention.train.checkpoint import read_weights
from primal_attention.train.config import from_plain, to_plain
from primal_attention.train.task import Batches, Experiment, derive_seed
from primal_attention.train.uea import (
    AugmentConfig,
    ClassificationModule,
    ClassifierConfig,
    UEARecipe,
    make_model,
    modern_recipe,
)
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import COUNT, check, write_atomically
from primal_attention.utils.pretrained import WEIGHTS, pretrained_path

FORMAT = 4
SAVED = {
    "parameters": dict,
    "network": dict,
    "classes": list,
    "classes_dtype": str,
    "n_channels": COUNT,
    "max_length": COUNT,
    "networks": int,
    "features": (dict, None),
}
T = TypeVar("T")
EVALUATED_SAMPLES = 256  # in one batch
STEPS, MIN_EPOCHS = 400, 15  # of each network, unless `epochs` is given
MAX_DEVIATION = 1e6  # of a value from the mean, in standard deviations
USUAL_WEIGHTS = {"networks": 0.6, "features": 2.5}  # of the parts, if there are few samples to choose them


class PrimalClassifier(BaseClassifier):
    """Time-series classifier: Transformers with Primal-Attention beside a ridge head over random convolutions.

    The training samples are split into folds. Each network is trained with the KSVD objective on all folds but one and
    predicts that one; the ridge head has leave-one-out predictions. These predictions choose the weights of the two
    parts, which also calibrate the probabilities.

    Series may have any number of channels, unequal lengths and missing values (interpolated along time). Channels are
    standardised by the training samples, and their principal directions are added as channels. For the networks,
    heavy-tailed channels are compressed by arcsinh first, and long series become at most `tokens` tokens.

    Parameters
    ----------
    networks : int, default=3
        Number of folds and networks. 0 leaves the networks out.
    features : bool, default=True
        Use the ridge head over random-convolution features.
    epochs : int or None, default=None
        Passes of each network over its samples; None makes about 400 steps, at least 15 epochs.
    batch_size : int, default=32
    learning_rate : float, default=3e-3
        Peak of the one-cycle schedule.
    attention : str, default="primal"
        Attention of all layers; "primal+" puts Primal-Attention in the last layer only, "none" has convolutions only.
        See `make_attention`.
    embed_dim, num_heads, layers : int
        Width, heads and depth of the networks.
    rank, landmarks : int
        Directions of Primal-Attention, and rows of the input that its weights are built from.
    tokens : int, default=64
        Consecutive steps are averaged so that the longest training series has at most so many tokens.
    dropout : float, default=0.0
    eta : float, default=0.1
        Weight of the KSVD loss.
    augment : bool, default=True
        Warp, scale and mix the training series at random.
    device : str, default="auto"
        Of the networks: "auto", "cpu" or "gpu".
    verbose : bool, default=False
        Show a progress bar.
    random_state : int, RandomState instance or None, default=None

    Attributes
    ----------
    classes_ : array of the class labels
    n_classes_, n_channels_ : int
    network_ : ClassifierConfig
        The networks.
    combination_ : dict
        Weights of the log-probabilities of the networks ("networks") and of the scores of the ridge head ("features").
    held_out_ : dict
        Scores (samples, classes) of both parts for the training samples, without the sample or its fold.
    fit_seconds_ : dict
        Wall time of the training of both parts.
    history_ : list of dict
        One row of losses per network and epoch.

    References
    ----------
    Y. Chen, Q. Tao, F. Tonin, J. Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
    Representation", NeurIPS 2023.

    A. Dempster, D. Schmidt, G. Webb, "Hydra: competing convolutional kernels for fast and accurate time series
    classification", Data Mining and Knowledge Discovery, 2023.

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
        networks: int = 3,
        features: bool = True,
        epochs: int | None = None,
        batch_size: int = 32,
        learning_rate: float = 3e-3,
        attention: str = "primal",
        embed_dim: int = 64,
        num_heads: int = 4,
        layers: int = 2,
        rank: int = 16,
        landmarks: int = 32,
        tokens: int = 64,
        dropout: float = 0.0,
        eta: float = 0.1,
        augment: bool = True,
        device: str = "auto",
        verbose: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.networks = networks
        self.features = features
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.attention = attention
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.layers = layers
        self.rank = rank
        self.landmarks = landmarks
        self.tokens = tokens
        self.dropout = dropout
        self.eta = eta
        self.augment = augment
        self.device = device
        self.verbose = verbose
        self.random_state = random_state
        super().__init__()

    def recipe(self, seed: int = 0, samples: int = 1) -> UEARecipe:
        """The training recipe of a network that the parameters describe.

        Args:
            seed: Seed of all random numbers.
            samples: Number of training samples, from which `epochs=None` follows.
        """
        base, given = modern_recipe(""), self._plain_parameters()
        names = ("embed_dim", "num_heads", "layers", "rank", "landmarks", "tokens", "dropout")
        shared = {name: given[name] for name in names}
        epochs = given["epochs"]
        if epochs is None:
            epochs = max(MIN_EPOCHS, round(STEPS / -(-samples // self.batch_size)))
        return replace(
            base,
            seed=seed,
            eta=given["eta"],
            model=replace(base.model, attention=(self.attention,), ffn_dim=2 * self.embed_dim, **shared),
            augment=base.augment if self.augment else AugmentConfig(label_smoothing=base.augment.label_smoothing),
            optim=replace(base.optim, lr=given["learning_rate"]),
            trainer=replace(
                base.trainer,
                epochs=epochs,
                batch_size=given["batch_size"],
                accelerator=self.device,  # type: ignore[arg-type]
                progress=self.verbose,
            ),
        )

    def _plain_parameters(self) -> dict[str, Any]:
        """The parameters with numbers of Python for those of numpy, as a search over arrays sets them."""
        return {n: value.item() if isinstance(value, np.generic) else value for n, value in self.get_params().items()}

    def _fit(self, X: Sequence[np.ndarray], y: np.ndarray) -> PrimalClassifier:
        if self.networks < 0 or self.networks == 1 or not (self.networks or self.features):
            raise ValueError(f"networks must be at least 2, or 0 with features=True (networks={self.networks})")
        if not isinstance(self.attention, str):
            raise ValueError(f"attention must be one name for all networks (attention={self.attention!r})")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.network_ = _checked(self.recipe, seed).model
        labels = np.array([self._class_dictionary[label] for label in y], dtype=np.int64)
        series = to_series(X)
        self.n_channels_, self.max_length_ = series[0].shape[1], max(len(s) for s in series)
        self.standard_ = {"networks": CompressedChannels.fit(series), "features": PrincipalChannels.fit(series)}
        self.n_networks_ = int(self.networks)
        self.weights_: dict[str, np.ndarray] = {}
        self.history_: list[dict[str, Any]] = []
        self.held_out_: dict[str, np.ndarray] = {}
        self.features_, self.ridge_, self.posterior_ = None, None, None
        started = time.perf_counter()
        if self.networks:
            # The result does not depend on the caller's random generator, and leaves it unchanged.
            with torch.random.fork_rng():
                inputs = self._standardise("networks", series)
                self.held_out_["networks"] = _checked(self._fit_networks, inputs, labels, seed)
        middle = time.perf_counter()
        if self.features:
            inputs = self._standardise("features", series)
            self.features_ = ConvolutionFeatures.fit(inputs, seed)
            self.ridge_, self.held_out_["features"] = RidgeHead.fit(self.features_(inputs), labels, self.n_classes_)
        self.fit_seconds_ = {"networks": middle - started, "features": time.perf_counter() - middle}
        usual = [USUAL_WEIGHTS[part] for part in self.held_out_]
        weights = fit_weights(list(self.held_out_.values()), labels, usual)
        self.combination_ = dict(zip(self.held_out_, weights.tolist(), strict=True))
        if self.networks and self.attention.rstrip("+") == "primal":
            self.posterior_ = ScorePosterior.fit(self._scores(series))
        return self

    def _standardise(self, part: str, series: Sequence[np.ndarray]) -> list[np.ndarray]:
        # Larger values would overflow float32 in the networks.
        return [self.standard_[part](s).clip(-MAX_DEVIATION, MAX_DEVIATION) for s in series]

    def _fit_networks(self, series: list[np.ndarray], labels: np.ndarray, seed: int) -> np.ndarray:
        """Train one network per fold; return the log-probabilities of the samples by the network of their fold."""
        values, mask = pad(series, length=self.max_length_)
        tensors = [torch.from_numpy(array) for array in (values, mask, labels)]
        fold = folds(labels, self.networks, seed)
        held_out = np.zeros((len(labels), self.n_classes_))
        for i in range(self.networks):
            rows = torch.from_numpy(np.flatnonzero(fold != i))
            recipe = self.recipe(derive_seed("network", seed, i), len(rows))
            torch.manual_seed(derive_seed("weights", seed, i))
            model = make_model(recipe.model, values.shape[-1], self.n_classes_, self.max_length_)
            module = ClassificationModule(model, recipe, padded=bool(mask.any()))
            batches = Batches([t[rows] for t in tensors], self.batch_size, recipe.seed)
            experiment = Experiment(module, train=batches, test=batches, watched={})
            training = loop.Training(recipe, experiment, title=f"network {i + 1} of {self.networks}")
            training.fit()
            state = module.final_model.state_dict()
            self.weights_ |= {f"{i}/{name}": t.detach().cpu().numpy().copy() for name, t in state.items()}
            self.history_ += [{"network": i, **row} for row in training.state.rows]
            if (fold == i).any():
                own = np.flatnonzero(fold == i)
                held_out[own] = self._apply(i, [series[row] for row in own])
        return held_out

    def _apply(
        self, network: int, series: Sequence[np.ndarray], function: Callable[..., torch.Tensor] | None = None
    ) -> np.ndarray:
        """Apply a function of (model, values, mask) to a trained network in batches; the default: log-probabilities."""
        values, mask = pad(series, length=self.max_length_, clip=False)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # repeated from the training
            model = make_model(self.network_, values.shape[-1], self.n_classes_, self.max_length_)
        own = {name: a for name, a in self.weights_.items() if name.startswith(f"{network}/")}
        model.load_state_dict({name.partition("/")[2]: torch.from_numpy(array.copy()) for name, array in own.items()})
        where = distributed.pick_device(self.recipe().trainer)
        model.to(where).eval()
        batches = Batches([torch.from_numpy(array) for array in (values, mask)], EVALUATED_SAMPLES).to(where)
        function = function or (lambda model, x, padding: model(x, padding).cpu().double().log_softmax(dim=-1))
        with torch.no_grad():
            return torch.cat([function(model, x, padding).cpu() for x, padding in batches]).numpy()

    def _scores(self, series: Sequence[np.ndarray]) -> np.ndarray:
        """Pooled projection scores of the Primal layers of each network, (networks, samples, scores)."""
        inputs = self._standardise("networks", series)
        return np.stack([self._apply(i, inputs, pooled_scores) for i in range(self.n_networks_)])

    def _check_series(self, X: Sequence[np.ndarray]) -> list[np.ndarray]:
        series = to_series(X)
        if series[0].shape[1] != self.n_channels_:
            raise ValueError(f"X has {series[0].shape[1]} channels, the classifier was fitted on {self.n_channels_}")
        return series

    def _predict(self, X: Sequence[np.ndarray]) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(axis=1)]

    def _predict_proba(self, X: Sequence[np.ndarray]) -> np.ndarray:
        scores = sum(self.combination_[part] * scores for part, scores in self._parts(X).items())
        return softmax(scores, axis=1)

    def _parts(self, X: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Scores (samples, classes) of the networks and of the features, as in `held_out_`."""
        series, parts = self._check_series(X), {}
        if self.n_networks_:
            inputs = self._standardise("networks", series)
            parts["networks"] = np.mean([self._apply(i, inputs) for i in range(self.n_networks_)], axis=0)
        if self.features_ is not None and self.ridge_ is not None:
            parts["features"] = self.ridge_(self.features_(self._standardise("features", series)))
        return parts

    def predict_uncertainty(self, X: Sequence[np.ndarray]) -> np.ndarray:
        """Entropy of the predictive distribution, with the variance of the kernel SVD taken into account.

        The scores of the classes are divided by √(1 + π/8 · variance), as for a Gaussian process classifier; see
        `ScorePosterior` for the variance. It is large for series whose projection scores are unlike those of the
        training samples, for example series of an unknown class.

        Args:
            X: (samples, channels, time), or a list of (channels, time).

        Returns:
            (samples,), from 0 to log(n_classes_).
        """
        self._check_is_fitted()
        if self.posterior_ is None:
            raise ValueError("predict_uncertainty needs networks with Primal-Attention")
        X = self._preprocess_collection(X, store_metadata=False)
        log_p = np.log(self._predict_proba(X).clip(min=1e-300))
        variance = self.posterior_(self._scores(self._check_series(X)))
        return entropy(softmax(log_p / np.sqrt(1 + np.pi / 8 * variance)[:, None], axis=1), axis=1)

    def save(self, file: str | Path) -> Path:
        """Write the fitted classifier to one safetensors file: arrays and a description, no code.

        Args:
            file: path of the file.
        """
        from safetensors.numpy import save

        self._check_is_fitted()
        parameters = self._plain_parameters()
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
            "networks": self.n_networks_,
            "combination": self.combination_,
            "features": None,
        }
        parts: dict[str, Any] = {"weights": self.weights_}
        parts |= {f"standard_{part}": vars(standard) for part, standard in self.standard_.items()}
        if self.features_ is not None:
            about["features"] = {name: getattr(self.features_, name) for name in ("shape", "kernels", "seed")}
            parts |= {"features": self.features_.arrays(), "ridge": vars(self.ridge_)}
        if self.posterior_ is not None:
            parts["posterior"] = vars(self.posterior_)
        arrays = {f"{part}/{name}": array for part, content in parts.items() for name, array in content.items()}
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        content = save(arrays, metadata={"primal_attention": json.dumps(about)})
        write_atomically(Path(file), lambda out: out.write(content))
        return Path(file)

    @classmethod
    def load(cls, file: str | Path) -> PrimalClassifier:
        """Read a classifier that `save` wrote; nothing in the file is executed.

        Args:
            file: path of the file, or the name of a classifier that the package includes.
        """
        path = pretrained_path(file)
        return _checked(cls._load, path / WEIGHTS if path.is_dir() else path)

    @classmethod
    def _load(cls, file: Path) -> PrimalClassifier:
        from safetensors import safe_open

        arrays = {name: t.numpy() for name, t in read_weights(file).items()}
        with safe_open(file, "np") as opened:
            about = json.loads((opened.metadata() or {}).get("primal_attention", "{}"))
        if about.get("kind") != "PrimalClassifier" or about.get("format") != FORMAT:
            raise RunError(f"{file} is not a PrimalClassifier of format {FORMAT} (got format {about.get('format')})")
        check(about, SAVED, file)
        parts: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = array
        plain = {"mean": ..., "std": ..., "basis": ...}
        compressed = plain | {"median": ..., "deviation": ...}
        check(parts, {"standard_networks": compressed, "standard_features": plain}, file)
        known = inspect.signature(cls.__init__).parameters
        self = cls(**{name: value for name, value in about["parameters"].items() if name in known})
        self.network_ = from_plain(ClassifierConfig, about["network"], f"{file}: network.")
        self.classes_ = np.array(about["classes"], dtype=about["classes_dtype"])
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {label: i for i, label in enumerate(self.classes_)}
        self.n_channels_, self.max_length_, self.n_networks_ = (
            about[name] for name in ("n_channels", "max_length", "networks")
        )
        self.combination_, self.held_out_ = about["combination"], {}
        self.standard_ = {
            "networks": CompressedChannels(**parts["standard_networks"]),
            "features": PrincipalChannels(**parts["standard_features"]),
        }
        self.weights_ = parts.get("weights", {})
        self.features_ = self.ridge_ = self.posterior_ = None
        if about["features"] is not None:
            self.features_ = ConvolutionFeatures.restore(parts["features"], **about["features"])
            self.ridge_ = RidgeHead(**parts["ridge"])
        if "posterior" in parts:
            self.posterior_ = ScorePosterior(**parts["posterior"])
        self.history_ = []
        self.is_fitted = True
        return self

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        return {
            "networks": 2,
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
