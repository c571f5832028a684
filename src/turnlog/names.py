"""Names that leave a process and have no other home: on a broker, in a shell, in a package's metadata.

Topics and records are named in schemas, settings in their declarations, metrics where they are counted. All of them are
frozen in tests/golden/names.toml (docs/schema-evolution.md, Names).
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final


class ConsumerGroup(StrEnum):
    """Groups that commit offsets: `ConsumerGroup.RUNNER.format(run=run_id)`. The first four have members. The others
    commit under the transactional id of their one owner; those of batcher, feeder, trainer and loader say how far the
    owner has come, for lag alone: their restarts begin elsewhere."""

    ASSEMBLER = "{run}.assembler"
    RUNNER = "{run}.runner"
    SANDBOX = "{run}.sandbox"
    VIEWS = "{run}-views"
    BATCHER = "{run}.batcher"
    FEEDER = "{run}.feeder"
    TRAINER = "{run}.trainer"
    LOADER = "{run}.loader.{engine}"
    ARCHIVE = "{archive}.archive"
    TRACE = "{run}.trace"


class TransactionalId(StrEnum):
    """Ids whose newest owner fences the last (KIP-98): `TransactionalId.BATCHER.format(run=run_id)`."""

    ASSEMBLER = "{run}.assembler.{unit}"
    BATCHER = "{run}.batcher"
    FEEDER = "{run}.feeder"
    TRAINER = "{run}.trainer"
    LOADER = "{run}.loader.{engine}"
    ARCHIVE = "{archive}.archive"
    TRACE = "{run}.trace"
    REGISTRY = "registry"


REGISTRY_TOPIC: Final = "_schemas"
"""Where the embedded registry keeps what it was given, as Confluent's does."""

RESTARTS_VARIABLE: Final = "TURNLOG_RESTARTS"
"""How often whoever watches a process has started it anew, as that process is told."""

VARIABLES = frozenset(
    {
        "TURNLOG_CHILD",
        "TURNLOG_DOCKER_HOST",
        "TURNLOG_DOCKER_IMAGE",
        "TURNLOG_DOCKER_RUNTIME",
        "TURNLOG_ENGINE_ID",
        "TURNLOG_ENGINE_INDEX",
        "TURNLOG_ENGINE_URL",
        "TURNLOG_HEALTH_HOST",
        "TURNLOG_HEALTH_PORT",
        "TURNLOG_IMAGES",
        "TURNLOG_INSTANCE",
        "TURNLOG_LOG_FORMAT",
        "TURNLOG_LOG_LEVEL",
        "TURNLOG_MAVEN_REPOSITORY",
        "TURNLOG_NOTIFY_FD",
        "TURNLOG_PARENT_FD",
        RESTARTS_VARIABLE,
        "TURNLOG_S3_ENDPOINT",
        "TURNLOG_SUPERVISED_ROLES",
        "TURNLOG_TRACEBACK",
        "TURNLOG_VERSION",
        "TURNLOG_WRITE_SCREENSHOTS",
        "TURNLOG_WRITE_TEMPLATES",
    }
)
"""Environment variables that are no settings: of one process, of compose.yaml, of the tests. Beside them only settings
and what begins with TEST_VARIABLES may begin with TURNLOG_."""
TEST_VARIABLES: Final = "TURNLOG_TEST_"

WRITER_HEADER: Final = "writer"
"""Role and instance that wrote the record."""
RECORD_HEADER: Final = "record"
"""The record's name, so that readers may pass over what they do not need."""
OUTPUT_TOKENS_HEADER: Final = "output_tokens"
"""On TokenSnapshot records, so that books count late tokens without decoding them."""
REQUEUED_HEADER: Final = "requeued"
"""The dead letter that the record was put back from."""
HEADERS = (WRITER_HEADER, RECORD_HEADER, OUTPUT_TOKENS_HEADER, REQUEUED_HEADER)


class ExitStatus(IntEnum):
    """What `turnlog VERB` ends with. `turnlog sandbox exec` ends as its command did, or as timeout(1) and shells do."""

    DONE = 0
    DIFFERS = 1
    """The verb did its work, and what it found is not as it should be, or nothing is recorded that could be."""
    FAILED = 2
    """A typed error, or a command line that cannot be read (argparse)."""
    NOT_UP = 3
    """`turnlog status` of a run that is not up."""
    UNREACHABLE = 75
    """EX_TEMPFAIL, "temporary failure, the user is invited to retry" (BSD sysexits(3)): a server did not answer."""
    INTERRUPTED = 130
    """128 + SIGINT, as a shell has it."""
    READER_GONE = 141
    """128 + SIGPIPE: whoever read what the verb prints has enough (`| head`)."""
    TERMINATED = 143
    """128 + SIGTERM. A role that was asked to stop ends with 0."""


TRAINING_ROLES: Final = (
    "gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "feeder", "registry", "egress",
)  # fmt: skip
"""Roles without which nothing is trained: one that cannot be kept running has the run started again, or ends it."""
OPTIONAL_ROLES: Final = ("views", "archive", "index", "dashboard", "alerts", "trace", "track", "lag")
"""Roles that show, copy or tell what is recorded anyway. A run trains without any of them, so none ever ends it or has
it started again: its failure is reported, and it is started again for as long as it takes."""


class EntryPointGroup(StrEnum):
    """Where a package offers its own."""

    RECIPES = "turnlog.recipes"
    TOOLS = "turnlog.tools"
    SANDBOX_BACKENDS = "turnlog.sandbox_backends"
    HARNESS_PROFILES = "turnlog.harness_profiles"
    POLICIES = "turnlog.policies"
    ESTIMATORS = "turnlog.estimators"
    GROUP_FILTERS = "turnlog.group_filters"
    REWARD_TRANSFORMS = "turnlog.reward_transforms"
    MODELS = "turnlog.models"
    ALGORITHMS = "turnlog.algorithms"
    AUXILIARY_LOSSES = "turnlog.auxiliary_losses"
