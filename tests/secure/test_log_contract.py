"""The whole contract of the log over SASL_SSL and over mTLS; `make test-secured` runs it (2 minutes)."""

from __future__ import annotations

import pytest

from tests.contract.test_log import TestKafkaLog as Contract
from tests.secured import SUPER, Secured
from turnlog.settings import KafkaSettings


class TestByScram(Contract):
    @pytest.fixture
    def wanted(self, secured: Secured) -> KafkaSettings:
        return secured.scram(SUPER)


class TestByMutualTls(Contract):
    @pytest.fixture
    def wanted(self, secured: Secured) -> KafkaSettings:
        return secured.mutual(SUPER)


del Contract  # it is no test of this file's
