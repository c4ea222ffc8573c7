"""The DeepSpeed provider addresses, restores and refuses state. One process group of each size runs all cases."""

from ranks import cases_as_tests

said, test_state = cases_as_tests("deepspeed_cases_state", worlds=(1, 2))
