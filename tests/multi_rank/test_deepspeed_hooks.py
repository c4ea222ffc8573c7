"""The hooks into a DeepSpeed engine, in real processes."""

from ranks import cases_as_tests

said, test_hooks = cases_as_tests("deepspeed_cases_hooks")
