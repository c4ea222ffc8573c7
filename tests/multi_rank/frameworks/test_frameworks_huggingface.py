"""Hugging Face's Trainer and Accelerate are captured on two ranks over gloo, started once for all cases."""

from ranks import cases_as_tests

said, test_huggingface = cases_as_tests("frameworks_cases_huggingface")
