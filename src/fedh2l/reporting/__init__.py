"""Display of progress and results."""
