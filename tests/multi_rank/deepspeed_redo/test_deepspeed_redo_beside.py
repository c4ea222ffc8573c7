"""Redo logs of DeepSpeed engines on two ranks, whose state something beside ordinary updates has made."""

from ranks import cases_as_tests

said, test_redo_beside = cases_as_tests("deepspeed_cases_redo_beside")
