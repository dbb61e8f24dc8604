"""Whole models built from the attention layers."""

from primal_attention.models.classifier import TimeSeriesClassifier as TimeSeriesClassifier
from primal_attention.models.decision import DecisionTransformer as DecisionTransformer

__all__ = ["DecisionTransformer", "TimeSeriesClassifier"]
