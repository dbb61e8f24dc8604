"""Stored numbers name command, commit, date, versions, device and the data."""

import json
import re
from pathlib import Path

import torch

from primal_attention.utils import provenance


def test_collect_describes_the_source_tree_and_the_device() -> None:
    origin = json.loads(json.dumps(provenance.collect(command="primal demo", device=torch.device("cpu"))))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", origin["date"])
    assert origin["command"] == "primal demo"
    assert origin["commit_source"] in ("git", None)
    assert (origin["commit"] or "").endswith("-changed") == bool(origin["dirty"])
    assert {"primal-attention", "python", "torch", "triton", "lightning", "cuda"} <= origin["versions"].keys()
    assert origin["hardware"]["device"] == "cpu"
    assert origin["data_sha256"] is None


def test_a_commit_given_by_hand_is_marked() -> None:
    origin = provenance.collect(command=None, commit="abc123")
    assert (origin["commit"], origin["dirty"], origin["commit_source"]) == ("abc123", None, "argument")


def test_the_hash_of_data_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    def digest(folder: str, **files: str) -> str:
        paths = [tmp_path / folder / name for name in files]
        (tmp_path / folder).mkdir(exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text)
        return provenance.hash_files(paths)

    assert digest("a", x="1", y="2") == digest("b", y="2", x="1")
    assert len({digest("a", x="1", y="2"), digest("a", x="2", y="1"), digest("a", x="12", y="")}) == 3
