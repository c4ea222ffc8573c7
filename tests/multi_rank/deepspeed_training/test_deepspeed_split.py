"""Pipelines and experts, whose ranks hold different parameters, are captured in real processes."""

import pytest
from ranks import cases_as_tests

pytestmark = pytest.mark.long

said, test_split = cases_as_tests("deepspeed_cases_split")
