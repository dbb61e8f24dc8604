"""Make the trained weights that the package includes, in src/primal_attention/pretrained.

    pip install -e '.[timeseries,language,hf]'
    python examples/make_pretrained.py classifier
    python examples/make_pretrained.py lm RUN

`classifier` fits a PrimalClassifier on JapaneseVowels, which comes with aeon, and writes its model card. `lm` converts
the run whose command is in the model card of primal-lm-tiny. `--out DIR` writes the folder elsewhere. PRIMAL_SMALL=1
fits the classifier for one epoch.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from primal_attention import PrimalClassifier
from primal_attention.utils.files import write_text
from primal_attention.utils.pretrained import FOLDER, WEIGHTS
from primal_attention.utils.provenance import code_version

SETTINGS: dict[str, Any] = {"random_state": 0, "device": "cpu"}
if os.environ.get("PRIMAL_SMALL"):
    SETTINGS["epochs"] = 1
CARD = """---
license: apache-2.0
library_name: primal-attention
pipeline_tag: time-series-classification
model-index:
- name: primal-uea-japanesevowels
  results:
  - task: {{type: time-series-classification}}
    dataset: {{type: uea, name: JapaneseVowels, split: test}}
    metrics: [{{type: accuracy, value: {accuracy:.4f}}}]
---

# primal-uea-japanesevowels

A `PrimalClassifier` (float32): three networks with {parameters:,} parameters together, and a ridge classifier on random
convolution features. It was fitted on JapaneseVowels: nine speakers, 12 LPC cepstrum coefficients per time step, 7 to
29 steps, 270 series for training and 370 for testing.

```python
from primal_attention import PrimalClassifier

classifier = PrimalClassifier.load("primal-uea-japanesevowels")
```

- **Accuracy on the test split**: {accuracy:.4f} ({right} of {count}), one seed. No choice used the test split.
- **Training data**: M. Kudo, J. Toyama, M. Shimbo, "Multidimensional curve classification using passing-through
  regions", Pattern Recognition Letters 20, 1999, in the version of the UEA archive that comes with aeon.
- **Command**: `python examples/make_pretrained.py classifier`, at commit
  {commit}; {seconds:.0f} s of CPU time. It fits
  `{classifier}`.
- **Intended use**: demonstrations, and tests of code around a classifier.
- **Limits**: the classes are nine speakers of one set of recordings. Any other series of 12 channels is assigned to one
  of them.
- **Licence**: Apache-2.0, like the library. The training data are not included.
"""


def make_classifier(folder: Path) -> str:
    """Fit the classifier, compute its accuracy on test once, and write both."""
    from aeon.datasets import load_japanese_vowels

    commit, start = code_version()["commit"], time.process_time()  # before files of the package change
    classifier = PrimalClassifier(**SETTINGS).fit(*load_japanese_vowels(split="train"))
    seconds = time.process_time() - start
    classifier.save(folder / WEIGHTS)
    X, y = load_japanese_vowels(split="test")
    right = int((PrimalClassifier.load(folder / WEIGHTS).predict(X) == y).sum())
    card = CARD.format(
        accuracy=right / len(y),
        right=right,
        count=len(y),
        parameters=sum(array.size for array in classifier.weights_.values()),
        seconds=seconds,
        commit=commit,
        classifier=" ".join(repr(classifier).split()),
    )
    write_text(folder / "README.md", card)
    return f"{right} of {len(y)} right"


def make_language_model(folder: Path, run: Path) -> str:
    """Convert a run; the weights are stored in float16 and loaded in float32."""
    from primal_attention.hf import from_run

    model, tokenizer = from_run(run)
    model.to(torch.float16)
    model.save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"{model.num_parameters():,} parameters"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("classifier", "lm"))
    parser.add_argument("run", type=Path, nargs="?", help="run folder of the language model")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the folder is written")
    options = parser.parse_args()
    if (options.kind == "lm") != (options.run is not None):
        parser.error("lm takes a run folder, classifier takes none")
    name = "primal-lm-tiny" if options.run else "primal-uea-japanesevowels"
    about = make_language_model(options.out / name, options.run) if options.run else make_classifier(options.out / name)
    print(f"{about}, written to {options.out / name}")
