"""Checkpoints are exported to DeepSpeed and imported from it, with DeepSpeed itself on the other side."""

import pytest
from ranks import groups_as_tests

# The set-up of the first test runs several groups, each with its own time limit.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

folder, said, test_export_import = groups_as_tests(
    ("deepspeed_cases_export", 1),
    ("deepspeed_cases_export", 2),
    ("deepspeed_cases_import", 1),
    ("deepspeed_cases_import", 2),
)
