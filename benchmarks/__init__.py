"""DSHistory measured beside the other ways to save a training: `make bench`, or `python -m benchmarks --help`."""
