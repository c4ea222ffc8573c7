"""Configurations are refused by name, on real engines."""

from ranks import cases_as_tests

said, test_refused = cases_as_tests("deepspeed_cases_refused")
