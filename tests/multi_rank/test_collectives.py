"""A plain PyTorch loop on two ranks, in real processes."""

from ranks import cases_as_tests

said, test_two_ranks = cases_as_tests("capture_cases")
