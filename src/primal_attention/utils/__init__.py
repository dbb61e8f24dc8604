"""Shared by several packages: errors, files, figures, progress, provenance and included weights."""
