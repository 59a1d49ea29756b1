"""Models: their files, layers and weights."""
