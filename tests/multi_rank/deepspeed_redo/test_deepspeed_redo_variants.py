"""Redo logs of the less common DeepSpeed engines on two ranks."""

import pytest
from ranks import cases_as_tests

pytestmark = pytest.mark.long

said, test_redo_variants = cases_as_tests("deepspeed_cases_redo_variants")
