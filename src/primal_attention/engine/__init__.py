"""Everything that trains: typed recipes, Lightning modules, the runner and its run folders.

Read first: `config.py` (what a recipe is), `uea.py` (one benchmark's recipes), `runner.py` (what a run does).
"""
