"""The command `primal`: one file per command."""
