"""Redo logs of DeepSpeed engines on two ranks. One process group runs all cases."""

from ranks import cases_as_tests

said, test_redo = cases_as_tests("deepspeed_cases_redo")
