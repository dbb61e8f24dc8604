"""Models of the benchmarks, built from the attention layers."""

from primal_attention.models.d4rl import DecisionTransformer as DecisionTransformer
from primal_attention.models.uea import TimeSeriesClassifier as TimeSeriesClassifier

__all__ = ["DecisionTransformer", "TimeSeriesClassifier"]
