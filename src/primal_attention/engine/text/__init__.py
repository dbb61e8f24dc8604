"""Language models: recipes, windows of text, perplexity, and text from a finished run."""
