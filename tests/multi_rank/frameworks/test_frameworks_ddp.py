"""DistributedDataParallel and torch.compile are captured on two ranks over gloo, started once for all cases."""

from ranks import cases_as_tests

said, test_ddp = cases_as_tests("frameworks_cases_ddp")
