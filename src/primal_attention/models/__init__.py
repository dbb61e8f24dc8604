"""Whole models built from the attention layers."""

from primal_attention.models.classifier import TimeSeriesClassifier as TimeSeriesClassifier

__all__ = ["TimeSeriesClassifier"]
