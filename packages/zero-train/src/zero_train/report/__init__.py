"""Reports a run: lines, metrics, the picture."""
