"""Other ways to compute on a CPU what PyTorch is slow at."""
