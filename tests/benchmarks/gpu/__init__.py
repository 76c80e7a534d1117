"""What a GPU does with all of this, in stages: see __main__.py, and docs/results/gpu.md."""
