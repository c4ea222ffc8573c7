"""Pipelines and experts, whose ranks hold different parameters, are captured in real processes."""

from ranks import cases_as_tests

said, test_split = cases_as_tests("deepspeed_cases_split")
