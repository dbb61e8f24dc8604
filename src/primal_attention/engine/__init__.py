"""Everything that trains: typed recipes, Lightning modules, the runner and its run folders.

This folder is what all benchmarks share. Read first: `config.py` (what a recipe is), `module.py` (what a step is),
`runner.py` (what a run does). One room per benchmark: `timeseries`, `arena`, `control`, `text`, `vision`. `tables` runs
grids and lays out the paper's tables; `scale` is for several processes.
"""
