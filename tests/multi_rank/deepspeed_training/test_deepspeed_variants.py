"""Less common DeepSpeed engines are captured in real processes.

The first run compiles DeepSpeed's CPU Adam.
"""

import pytest
from ranks import cases_as_tests

pytestmark = pytest.mark.long

said, test_variants = cases_as_tests("deepspeed_cases_variants")
