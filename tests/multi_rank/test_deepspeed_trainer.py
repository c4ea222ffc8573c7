"""Hugging Face's Trainer with DeepSpeed on two ranks."""

from ranks import cases_as_tests

said, test_trainer = cases_as_tests("deepspeed_cases_trainer")
