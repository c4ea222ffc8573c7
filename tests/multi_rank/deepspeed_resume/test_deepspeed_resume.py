"""A training is captured by one set of processes and resumed by another, of the same size and of the other."""

import pytest
from ranks import groups_as_tests

# The set-up of the first test runs several groups, each with its own time limit.
pytestmark = pytest.mark.timeout(1800)

folder, said, test_resume = groups_as_tests(
    ("deepspeed_cases_original", 1),
    ("deepspeed_cases_original", 2),
    ("deepspeed_cases_again", 1),
    ("deepspeed_cases_again", 2),
)
