"""Less common DeepSpeed engines are captured in real processes.

The first run compiles DeepSpeed's CPU Adam, so they have a target of their own, `make test-variants`.
"""

import pytest
from ranks import cases_as_tests

pytestmark = pytest.mark.exhaustive

said, test_variants = cases_as_tests("deepspeed_cases_variants")
