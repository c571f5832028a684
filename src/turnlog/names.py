"""Names that leave a process and are defined nowhere else: on a broker, in a shell, in the metadata of a package.

Topics and records are named in schemas, settings in their declarations, metrics where they are counted. All of them are
frozen in tests/golden/names.toml (docs/schema-evolution.md, Names).
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final


class ConsumerGroup(StrEnum):
    """Consumer groups that commit offsets: `ConsumerGroup.RUNNER.format(run=run_id)`.

    The first four have members. The others commit under the transactional id of their single owner. Those of batcher,
    feeder, trainer and loader record the owner's progress only for lag metrics; their restarts do not begin at the
    committed offset.
    """

    ASSEMBLER = "{run}.assembler"
    RUNNER = "{run}.runner"
    SANDBOX = "{run}.sandbox"
    VIEWS = "{run}-views"
    BATCHER = "{run}.batcher"
    FEEDER = "{run}.feeder"
    TRAINER = "{run}.trainer"
    LOADER = "{run}.loader.{engine}"
    TINKER = "{run}.tinker"
    ARCHIVE = "{archive}.archive"
    TRACE = "{run}.trace"


class TransactionalId(StrEnum):
    """Transactional ids, whose newest owner fences the previous one (KIP-98):
    `TransactionalId.BATCHER.format(run=run_id)`."""

    ASSEMBLER = "{run}.assembler.{unit}"
    BATCHER = "{run}.batcher"
    FEEDER = "{run}.feeder"
    TRAINER = "{run}.trainer"
    LOADER = "{run}.loader.{engine}"
    TINKER = "{run}.tinker"
    ARCHIVE = "{archive}.archive"
    TRACE = "{run}.trace"
    REGISTRY = "registry"


REGISTRY_TOPIC: Final = "_schemas"
"""Topic in which the embedded registry stores schemas, named as Confluent's is."""

RESTARTS_VARIABLE: Final = "TURNLOG_RESTARTS"
"""Variable by which a supervisor tells a process how often it has been restarted."""

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
"""Environment variables that are no settings: those of one process, of compose.yaml and of the tests. Only these,
settings and names that begin with TEST_VARIABLES may begin with TURNLOG_."""
TEST_VARIABLES: Final = "TURNLOG_TEST_"

WRITER_HEADER: Final = "writer"
"""Role and instance that wrote the record."""
RECORD_HEADER: Final = "record"
"""The record's name, so that readers can skip records that they do not need."""
OUTPUT_TOKENS_HEADER: Final = "output_tokens"
"""Number of output tokens of a TokenSnapshot record, so that token accounting counts late tokens without decoding them.
"""
REQUEUED_HEADER: Final = "requeued"
"""event_id of the dead letter that the record was requeued from."""
CODE_HEADER: Final = "code"
"""Version of turnlog that wrote the record, with its git commit if it is known (infra/code_version.py)."""
HEADERS = (WRITER_HEADER, RECORD_HEADER, OUTPUT_TOKENS_HEADER, REQUEUED_HEADER, CODE_HEADER)


class ExitStatus(IntEnum):
    """Exit status of `turnlog VERB`. `turnlog sandbox exec` ends with the status of its command, or as timeout(1) and
    shells do."""

    DONE = 0
    DIFFERS = 1
    """The verb did its work and found something wrong, or nothing is recorded that it could work on."""
    FAILED = 2
    """A typed error, or a command line that cannot be read (argparse)."""
    NOT_UP = 3
    """`turnlog status` was called for a run that is not up."""
    UNREACHABLE = 75
    """EX_TEMPFAIL, "temporary failure, the user is invited to retry" (BSD sysexits(3)): a server did not answer."""
    INTERRUPTED = 130
    """128 + SIGINT, as in a shell."""
    READER_GONE = 141
    """128 + SIGPIPE: the reader of the verb's output closed it (`| head`)."""
    TERMINATED = 143
    """128 + SIGTERM. A role that is stopped by a signal ends with 0."""


TRAINING_ROLES: Final = (
    "gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "feeder", "registry", "egress",
    "tinker",
)  # fmt: skip
"""Roles that training needs. If one of them cannot be kept running, the run is started again or ends."""
OPTIONAL_ROLES: Final = ("views", "archive", "index", "dashboard", "alerts", "trace", "track", "lag")
"""Roles that only display, copy or export what is recorded anyway. A run trains without them, so the failure of one
never ends or restarts the run: it is reported, and the role is restarted for as long as it takes."""


class EntryPointGroup(StrEnum):
    """Entry point groups in which packages offer plugins."""

    RECIPES = "turnlog.recipes"
    TOOLS = "turnlog.tools"
    SANDBOX_BACKENDS = "turnlog.sandbox_backends"
    HARNESS_PROFILES = "turnlog.harness_profiles"
    POLICIES = "turnlog.policies"
    ESTIMATORS = "turnlog.estimators"
    GROUP_FILTERS = "turnlog.group_filters"
    REWARD_TRANSFORMS = "turnlog.reward_transforms"
    MODELS = "turnlog.models"
    LAUNCHERS = "turnlog.launchers"
    ALGORITHMS = "turnlog.algorithms"
    AUXILIARY_LOSSES = "turnlog.auxiliary_losses"
    CHEAT_DETECTORS = "turnlog.cheat_detectors"
