"""The hooks into a DeepSpeed engine work in real processes."""

from ranks import cases_as_tests

said, test_hooks = cases_as_tests("deepspeed_cases_hooks")
