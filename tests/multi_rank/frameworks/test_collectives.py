"""A plain PyTorch loop is captured on two ranks in real processes."""

from ranks import cases_as_tests

said, test_two_ranks = cases_as_tests("capture_cases")
