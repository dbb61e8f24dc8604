"""Multivariate time series: the UEA archive's recipes, and the classifier for people with data."""
