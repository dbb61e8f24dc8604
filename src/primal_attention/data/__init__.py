"""Readers of the files of each benchmark, in the layouts of their releases. No reader needs a model."""
