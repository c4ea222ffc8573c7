"""save_checkpoint and load_checkpoint run through the native writer: on two ranks, then on one that loads from them."""

import pytest
from ranks import groups_as_tests

# The set-up of the first test runs both groups, each with its own time limit.
pytestmark = pytest.mark.timeout(1200)

folder, said, test_engine = groups_as_tests(("deepspeed_cases_engine", 2), ("deepspeed_cases_engine_alone", 1))
