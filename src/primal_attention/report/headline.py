"""The one number that a run is known by, in the words of its benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def headline(score: Mapping[str, Any]) -> str:
    """For a line among others: an accuracy in per cent, or D4RL's normalised score with the return behind it."""
    if "accuracy" in score:
        return f"{100 * score['accuracy']:.2f}"
    if "bits_per_byte" in score:
        return f"{score['bits_per_byte']:.4f} bits per byte"
    if "return_mean" in score:
        return f"{score['score']:.1f} (return {score['return_mean']:.0f} ± {score['return_std']:.0f})"
    return f"{score['score']:.1f}" if "score" in score else "not measured"


def in_full(score: Mapping[str, Any]) -> str:
    """For a line of its own."""
    if "accuracy" in score:
        return f"test accuracy {100 * score['accuracy']:6.2f} %"
    if "bits_per_byte" in score:
        return f"test perplexity {score['perplexity']:.2f}  bits per byte {score['bits_per_byte']:.4f}"
    if "score" not in score:
        return "no episodes were played: 'primal evaluate RUN' plays them"
    words = f"normalised score {score['score']:6.1f}"
    if "return_mean" in score:
        played = f"{score['episodes']} episodes, target {score['target']:.0f}"
        words += f"  return {score['return_mean']:.0f} ± {score['return_std']:.0f}  {played}"
    return words
