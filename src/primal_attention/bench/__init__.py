"""How fast attention layers are on this machine: `primal bench`, or `python -m primal_attention.bench`.

Read first: `contenders.py` (who runs), `gate.py` (who may be timed), `run.py` (what a run does). Needs torch alone;
rich draws the progress bar and matplotlib the picture where they are installed.
"""
