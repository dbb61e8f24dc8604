"""Readers of the layouts that people already have on disk. Each file is one benchmark; nothing here needs a model."""
