"""Pipelines and experts: two ranks that hold different parameters, in real processes."""

from ranks import cases_as_tests

said, test_split = cases_as_tests("deepspeed_cases_split")
