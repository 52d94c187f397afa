"""Benchmarks, one file per question: `python -m benchmarks.<name>`; results are in `results/`."""
