"""Hugging Face's Trainer with DeepSpeed is captured on two ranks."""

from ranks import cases_as_tests

said, test_trainer = cases_as_tests("deepspeed_cases_trainer")
