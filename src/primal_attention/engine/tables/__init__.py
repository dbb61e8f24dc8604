"""The paper's tables: what has to run, running it, and laying it out."""
