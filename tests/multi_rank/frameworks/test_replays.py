"""Replays and crossovers on two ranks over gloo, started once for all cases."""

from ranks import cases_as_tests

said, test_replays = cases_as_tests("replay_cases")
