"""Benchmarks of DSHistory beside other ways to save a training: `make bench`, or `python -m benchmarks --help`."""
