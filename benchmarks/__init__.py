"""Benchmarks of whole training steps: `python -m benchmarks.steps`, from the repository's root."""
