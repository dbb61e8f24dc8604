"""What several packages need: errors, files, progress, provenance."""
