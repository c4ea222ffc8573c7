"""Common DeepSpeed trainings are captured in real processes."""

from ranks import cases_as_tests

said, test_usual = cases_as_tests("deepspeed_cases_usual")
