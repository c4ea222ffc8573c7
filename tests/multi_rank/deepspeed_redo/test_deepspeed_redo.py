"""Redo logs of DeepSpeed engines on two ranks, and then on one that goes on from theirs."""

import pytest
from ranks import groups_as_tests

# The set-up of the first test runs both groups, each with its own time limit.
pytestmark = pytest.mark.timeout(1200)

folder, said, test_redo = groups_as_tests(("deepspeed_cases_redo", 2), ("deepspeed_cases_redo_alone", 1))
