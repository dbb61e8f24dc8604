"""Long-Range Arena: recipes, streams from disk, what an attention costs there, and the sets that can be made."""
