"""Series: the archive's reader, one's own files, and what is filled, scaled, padded and held out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from hostile_data import TS_HEADER, save_columns
from primal_attention.data import uea
from primal_attention.data.uea import CompressedChannels, PrincipalChannels, Standardizer
from primal_attention.utils.errors import DataError

nan = np.nan
SAMPLES = ["1,2,3:4,5,6:a", "1,2:4,5:b", "1,?,3,4:4,5,6,NaN:b"]


def write_ts(file: Path, lines: list[str], classes: str = "a b") -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join([*TS_HEADER, f"@classLabel true {classes}", "@data", *lines, ""]))
    return file


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    write_ts(tmp_path / "Toy" / "Toy_TRAIN.ts", SAMPLES)
    write_ts(tmp_path / "Toy" / "Toy_TEST.ts", SAMPLES[:2])
    return tmp_path


# The archive


def test_japanese_vowels_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_UEA", raising=False)
    data = uea.load("JapaneseVowels")
    assert (len(data.train), len(data.test), data.channels, data.max_length) == (270, 370, 12, 26)
    assert data.classes == tuple("123456789")
    assert np.bincount(data.train.labels).tolist() == [30] * 9
    monkeypatch.setenv("PRIMAL_UEA", str(tmp_path / "nope"))  # a folder that was named is not replaced by aeon's copy
    assert uea.find("JapaneseVowels") is None
    with pytest.raises(DataError, match=r"nope, which does not exist"):
        uea.load("JapaneseVowels")


def test_unequal_lengths_and_missing_values(toy: Path):
    data = uea.load("Toy", toy)
    assert [s.shape for s in data.train.series] == [(3, 2), (2, 2), (4, 2)]
    assert data.train.series[2].T.tolist() == [[1, 2, 3, 4], [4, 5, 6, 6]]
    assert data.train.labels.tolist() == [0, 1, 1]
    assert len(uea.load("Toy", toy / "Toy").train) == 3, "files directly in the folder are found"


def test_numeric_labels_are_ordered_by_value(tmp_path: Path):
    for part in ("TRAIN", "TEST"):
        write_ts(tmp_path / f"Toy_{part}.ts", ["1,2:3,4:10", "1,2:3,4:9"], classes="9 10")
    data = uea.load("Toy", tmp_path)
    assert data.classes == ("9", "10")
    assert data.test.labels.tolist() == [1, 0]


def test_a_missing_set_or_file_says_what_to_do(toy: Path):
    with pytest.raises(DataError, match=r"timeseriesclassification\.com"):
        uea.load("Handwriting", toy / "nowhere")
    with pytest.raises(DataError, match="did you mean Toy"):
        uea.load("Tooy", toy)
    with pytest.raises(DataError, match=r"Toy_TEST\.ts, which is a file: get it from"):
        uea.load("Toy", toy / "Toy" / "Toy_TEST.ts")
    (toy / "Toy" / "Toy_TEST.ts").unlink()
    with pytest.raises(DataError, match=r"Toy_TEST\.ts is missing"):
        uea.load("Toy", toy)


def test_the_test_file_must_match_the_training_file(toy: Path):
    test = write_ts(toy / "Toy" / "Toy_TEST.ts", ["1,2:3,4:c"], classes="a b c")
    with pytest.raises(DataError, match=r"label 'c' does not occur in Toy_TRAIN\.ts"):
        uea.load("Toy", toy)
    write_ts(test, ["1,2:3,4:5,6:a"])
    with pytest.raises(DataError, match="3 channels where"):
        uea.load("Toy", toy)


# One's own files


def write_npz(file: Path, **changes: Any) -> Path:
    """Ten samples, two channels, of length 3 (a) and 4 (b)."""
    x = np.arange(80.0).reshape(10, 2, 4)
    x[:5, :, 3] = nan
    arrays = {"X": x, "y": np.repeat(["a", "b"], 5), **changes}
    np.savez(file, **{key: value for key, value in arrays.items() if value is not None})
    return file


def write_parquet(file: Path, **changes: Any) -> Path:
    """The samples of `write_npz` in long form, rows in a random order."""
    rows = [(i, t) for i in range(10) for t in range(3 if i < 5 else 4)]
    order = np.random.default_rng(0).permutation(len(rows))
    sample, time = (np.array(column)[order] for column in zip(*rows, strict=True))
    table = {
        "sample": np.array([f"s{i}" for i in sample]),
        "time": time,
        "left": sample * 8.0 + time,
        "right": sample * 8.0 + 4 + time,
        "label": np.where(sample < 5, "a", "b"),
        **changes,
    }
    columns = {key: value for key, value in table.items() if value is not None}
    save_columns(file, columns)
    return file


def write_own_ts(file: Path) -> Path:
    lines = []
    for i in range(10):
        left, right = (",".join(str(start + t) for t in range(3 if i < 5 else 4)) for start in (8 * i, 8 * i + 4))
        lines.append(f"{left}:{right}:{'a' if i < 5 else 'b'}")
    return write_ts(file, lines)


@pytest.mark.parametrize(
    ("name", "write"), [("x.npz", write_npz), ("x.parquet", write_parquet), ("x.ts", write_own_ts)]
)
def test_one_file_is_split_class_by_class(name: str, write: Callable[[Path], Path], tmp_path: Path):
    file = write(tmp_path / name)
    data = uea.load_file(file, seed=1)
    assert (data.name, data.classes, data.channels) == ("x", ("a", "b"), 2)
    assert (len(data.train), len(data.test)) == (6, 4)  # 30 % of five samples, rounded to two, of each class
    first_values = set()
    for split in (data.train, data.test):
        for series, label in zip(split.series, split.labels, strict=True):
            assert series.shape == ((3, 2), (4, 2))[label]
            assert (series[:, 1] - series[:, 0] == 4).all()
            assert (np.diff(series[:, 0]) == 1).all(), "ordered by time"
            first_values.add(float(series[0, 0]))
    assert first_values == {8.0 * i for i in range(10)}, "every sample is in one split"
    again, other = (uea.load_file(file, seed=seed) for seed in (1, 2))
    assert [s[0, 0] for s in again.test.series] == [s[0, 0] for s in data.test.series]
    assert [s[0, 0] for s in other.test.series] != [s[0, 0] for s in data.test.series]


def test_a_test_file_is_the_test_split(tmp_path: Path):
    train = write_npz(tmp_path / "x_TRAIN.npz", y=np.repeat([1.0, 2.0], 5))
    test = write_parquet(tmp_path / "y.parquet", label=np.full(35, 2))  # integers there, whole floats in train
    data = uea.load_file(train, test)
    assert (data.name, len(data.train), len(data.test), data.classes) == ("x", 10, 10, ("1", "2"))
    assert (data.test.labels == 1).all()


def test_row_numbers_of_pandas_are_no_channel_bytes_are_text_and_arrays_may_lack_channels(tmp_path: Path):
    table = pd.read_parquet(write_parquet(tmp_path / "x.parquet"))
    table[table.time < 3].to_parquet(tmp_path / "y.parquet")
    assert "__index_level_0__" in pyarrow.parquet.read_schema(tmp_path / "y.parquet").names
    assert uea.load_file(tmp_path / "y.parquet").channels == 2
    assert uea.load_file(write_npz(tmp_path / "x.npz", y=np.repeat([b"a", b"b"], 5))).classes == ("a", "b")
    flat = write_npz(tmp_path / "flat.npz", X=np.arange(40.0).reshape(10, 4))
    assert uea.load_file(flat).train.series[0].shape == (4, 1)


NPZ, LONG = ("x.npz", write_npz), ("x.parquet", write_parquet)
BAD_FILES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no time": (NPZ, {"X": np.zeros((10, 2, 0))}, "sample 1 has no values"),
    "empty label": (NPZ, {"y": np.repeat(["", "b"], 5)}, r"label of sample 1 is missing \(empty text\)"),
    "NaN label": (NPZ, {"y": np.array([1.0, nan] * 5)}, "label of sample 2 is missing"),
    "one sample per class": (NPZ, {"y": np.arange(10)}, "every class has one sample only"),
    "no label column": (LONG, {"label": None}, "lacks the column 'label'"),
    "no time column": (LONG, {"time": None}, "lacks the column 'time'"),
    "no channels": (LONG, {"left": None, "right": None}, "no values"),
    "text channel": (LONG, {"left": ["x"] * 35}, "column 'left' must hold numbers"),
    "null label": (LONG, {"label": [None] * 35}, "label of sample 1 is missing"),
    "null sample": (LONG, {"sample": [None] * 35}, "'sample' and 'time' must have a value"),
    "NaN sample": (LONG, {"sample": [nan, *range(34)]}, "'sample' and 'time' must have a value"),
    "null time": (LONG, {"time": [None, *range(34)]}, "'sample' and 'time' must have a value"),
    "text time": (LONG, {"time": [str(i) for i in range(35)]}, "'time' must hold numbers or times"),
    "labels differ": (LONG, {"label": [*"ab"] * 17 + ["a"]}, "has more than one label"),
    "time repeats": (LONG, {"time": [0] * 35}, "has two rows with time 0"),
    "list samples": (LONG, {"sample": [[1]] * 35}, "not a parquet file"),
}


@pytest.mark.parametrize(
    ("form", "changes", "complaint"), BAD_FILES.values(), ids=[k.replace(" ", "-") for k in BAD_FILES]
)
def test_a_bad_file_of_ones_own_is_one_clear_line(form: Any, changes: dict[str, Any], complaint: str, tmp_path: Path):
    name, write = form
    file = write(tmp_path / name, **changes)
    with pytest.raises(DataError, match=complaint) as caught:
        uea.load_file(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_ending_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"ends in \.npz, \.parquet, \.ts"):
        uea.load_file(tmp_path / "x.csv")


# Preprocessing


def test_gaps_are_interpolated_and_missing_tails_cut():
    series = np.array([[nan, 1.0], [2.0, 2.0], [np.inf, nan], [6.0, 4.0], [nan, 5.0]])
    assert uea.interpolate_missing(series).T.tolist() == [[2.0, 2.0, 4.0, 6.0, 6.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    series = np.array([[1.0, nan], [2.0, 3.0], [nan, nan], [nan, nan]])
    assert len(uea.drop_missing_tail(series)) == 2
    assert len(uea.drop_missing_tail(np.full((3, 2), nan))) == 3


def test_statistics_are_those_of_all_training_steps_with_ddof_1():
    rng = np.random.default_rng(0)
    series = [rng.normal(3, 2, (n, 4)) for n in (5, 9, 2)]
    standard = Standardizer.fit(series)
    steps = np.concatenate(series)
    np.testing.assert_allclose(standard.mean, steps.mean(0))
    np.testing.assert_allclose(standard.std, steps.std(0, ddof=1))
    scaled = Standardizer.fit([1e-15 * s for s in series])  # such as magnetic fields in tesla
    np.testing.assert_allclose(scaled(1e-15 * series[0]), standard(series[0]))
    flat = [np.array([[1.0, 7.0, nan], [3.0, 7.0, nan]])]
    assert (Standardizer.fit(flat)(flat[0])[:, 1:] == 0).all(), "constant and absent channels become zero"


def test_padding_is_on_the_right_and_the_mask_is_true_there():
    values, mask = uea.pad([np.ones((2, 3)), np.ones((4, 3))], length=3)
    assert values.shape == (2, 3, 3)
    assert mask.tolist() == [[False, False, True], [False, False, False]]
    assert values[0, 2].tolist() == [0, 0, 0]
    assert uea.pad([np.ones((4, 3))], length=3, clip=False)[0].shape == (1, 4, 3)
    assert uea.pad([np.ones((2, 3))], length=3, clip=False)[0].shape == (1, 3, 3)


def test_the_holdout_keeps_class_proportions_and_depends_on_the_seed_alone():
    labels = np.repeat([0, 1, 2, 3], [50, 10, 5, 1])
    train, holdout = uea.stratified_holdout(labels, 0.2, seed=1)
    assert np.bincount(labels[holdout], minlength=4).tolist() == [10, 2, 1, 0], "never the only sample of a class"
    assert sorted([*train, *holdout]) == list(range(66))
    assert uea.stratified_holdout(labels, 0.2, seed=1)[1].tolist() == holdout.tolist()
    assert uea.stratified_holdout(labels, 0.2, seed=2)[1].tolist() != holdout.tolist()
    with pytest.raises(DataError, match="one sample only"):
        uea.stratified_holdout(np.array([0, 1]), 0.2, seed=0)


def principal(x: np.ndarray, series: list[np.ndarray]) -> np.ndarray:
    """The principal half of the channels."""
    return PrincipalChannels.fit(series)(x)[:, x.shape[1] :]


@pytest.mark.parametrize("channels", [4, 1])
def test_principal_channels_are_uncorrelated_with_unit_variance(channels: int):
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((channels, channels))
    series = [5 + rng.standard_normal((n, channels)) @ mixing for n in (50, 30, 80)]
    plain = PrincipalChannels.fit(series)(series[0])[:, :channels]
    np.testing.assert_array_equal(plain, Standardizer.fit(series)(series[0]))
    steps = np.concatenate([principal(s, series) for s in series])
    np.testing.assert_allclose(steps.mean(axis=0), 0.0, atol=1e-12)
    covariance = np.cov(steps.T).reshape(channels, channels)
    np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0.0, atol=1e-10)
    assert (np.diag(covariance) <= 1.0).all()
    assert (np.diag(covariance) > 0.9).all()  # less by the floor beside the smallest variance


def test_principal_channels_do_not_enlarge_rounding():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 2))
    copies = [x, x + 1e-9 * rng.standard_normal((100, 2)), np.full((100, 1), 7.0), np.full((100, 1), nan)]
    deviations = np.sort(principal(np.hstack(copies), [np.hstack(copies)]).std(axis=0))
    assert (deviations[:4] < 1e-6).all()
    assert (deviations[4:] > 0.9).all()


def test_principal_directions_have_one_sign_however_they_are_rounded():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    basis = PrincipalChannels.fit([x]).basis
    for _ in range(20):
        rounded = x * (1 + 1e-12 * rng.standard_normal(x.shape))
        np.testing.assert_allclose(PrincipalChannels.fit([rounded]).basis, basis, rtol=1e-6)


def test_heavy_tailed_channels_are_compressed_and_others_are_not():
    rng = np.random.default_rng(0)
    light, heavy = rng.standard_normal((500, 2)), np.sinh(4 * rng.standard_normal((500, 1)))
    empty, constant = np.full((500, 1), nan), np.full((500, 1), 7.0)
    usual = np.hstack([light, empty, constant])
    np.testing.assert_array_equal(CompressedChannels.fit([usual])(usual), PrincipalChannels.fit([usual])(usual))
    series = np.hstack([heavy, usual])
    series[7, 0] = nan  # a missing value of a heavy-tailed channel
    compressed = CompressedChannels.fit([series])(series)
    assert (np.abs(PrincipalChannels.fit([series])(series)[:, 0]) < 0.1).mean() > 0.9  # almost all values are lost
    assert (np.abs(compressed[:, 0]) < 0.1).mean() < 0.4
    assert compressed[7, 0] == 0
    np.testing.assert_array_equal(compressed[:, 1:5], Standardizer.fit([usual])(usual))
