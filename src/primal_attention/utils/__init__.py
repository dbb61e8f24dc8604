"""Shared by several packages: collectives, errors, files, figures, progress, provenance and included weights."""
