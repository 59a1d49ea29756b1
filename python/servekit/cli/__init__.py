"""Command lines. Nothing here imports what serves: `--help` has to answer at once."""
