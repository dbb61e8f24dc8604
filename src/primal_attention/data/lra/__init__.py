"""The tasks of Long-Range Arena."""
