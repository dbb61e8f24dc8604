"""Modules: parameters, masks, streaming state."""
