"""Common DeepSpeed trainings are captured in real processes."""

import pytest
from ranks import cases_as_tests

pytestmark = pytest.mark.long

said, test_usual = cases_as_tests("deepspeed_cases_usual")
