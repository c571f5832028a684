"""Tables of the index, each declared once for code, SQL and its page (docs/index-schema.md).

Each record is one row. Its key is its *place*: topic, partition and offset in one integer. If a record may be repeated,
a view shows the effective rows, and a table behind it holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnlog.infra.log import Partition
from turnlog.schemas import topics
from turnlog.schemas.topics import Topic

SCHEMA_VERSION = 8
"""Schema version in the file (PRAGMA user_version). Any change of a table needs a new version, and indexes are then
rebuilt."""

NUMBERED = (
    topics.RUNS, topics.TASKS, topics.SESSIONS, topics.TURNS, topics.SNAPSHOTS, topics.TOOL_CALLS, topics.TOOL_RESULTS,
    topics.TREES, topics.SAMPLES, topics.SCORES, topics.BATCHES, topics.STEPS, topics.WEIGHTS, topics.ENGINES,
    topics.DEAD_LETTERS,
)  # fmt: skip
"""Topics that are indexed. The position of a topic in this tuple is part of its places. group-requests and group-scores
are left out: they repeat tasks and segment-samples. weight-transfers are left out, too: versions and engine_events tell
what became of a transfer."""
NUMBER = {topic.name: number for number, topic in enumerate(NUMBERED)}
TOPIC_BITS, PARTITION_BITS, OFFSET_BITS = 58, 14, 44


def place_of(topic: str, partition: int, offset: int) -> int:
    """Return the place of a record: one integer, which grows with the offset within a partition."""
    return NUMBER[topic] << TOPIC_BITS | partition << OFFSET_BITS | offset


def standing(place: int) -> tuple[Partition, int]:
    """Return the partition and offset of a place; the inverse of `place_of`."""
    number = place >> OFFSET_BITS & (1 << PARTITION_BITS) - 1
    return Partition(NUMBERED[place >> TOPIC_BITS].name, number), place & (1 << OFFSET_BITS) - 1


def place_sql(place: str) -> str:
    """Return SQL for topic, partition and offset of a place, as columns."""
    names = " ".join(f"WHEN {number} THEN '{topic.name}'" for number, topic in enumerate(NUMBERED))
    return (
        f"CASE {place} >> {TOPIC_BITS} {names} END AS topic, "
        f"{place} >> {OFFSET_BITS} & {(1 << PARTITION_BITS) - 1} AS partition, "
        f'{place} & {(1 << OFFSET_BITS) - 1} AS "offset"'
    )


class TableColumn(NamedTuple):
    """A column with its SQL type and its description."""

    name: str
    kind: str
    says: str


def _columns(text: str) -> tuple[TableColumn, ...]:
    """Parse lines of name, type and description."""
    lines = (line.split(maxsplit=2) for line in text.strip().splitlines())
    return tuple(TableColumn(name, kind, says) for name, kind, says in lines)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the records of one topic, or a table derived from such tables (`topic` is None)."""

    name: str
    """Name of the SQL view over this table; derived tables use their own name."""
    says: str
    columns: tuple[TableColumn, ...]
    topic: Topic | None = None
    once: tuple[str, ...] = ()
    """Columns that identify the subject of a record: its first record is the effective one. If empty, every record
    is."""
    indexes: tuple[tuple[str, ...], ...] = ()
    key: str = ""
    """Primary key of a derived table."""

    @property
    def sql_name(self) -> str:
        """Name of the SQL table."""
        return f"{self.name}_records" if self.topic else self.name

    def statements(self) -> Iterator[str]:
        """Yield the SQL statements that create the table."""
        own = ", ".join(f'"{each.name}" {each.kind}' for each in self.columns)
        if self.topic is None:
            yield f"CREATE TABLE {self.sql_name} ({own}, PRIMARY KEY ({self.key})) WITHOUT ROWID"
        else:
            yield (
                f"CREATE TABLE {self.sql_name} (place INTEGER PRIMARY KEY, event_id TEXT, time_ms INTEGER, {own}, "
                "counts INTEGER NOT NULL)"
            )
            names = ", ".join(f'"{each.name}"' for each in self.columns)
            yield (
                f"CREATE VIEW {self.name} AS SELECT {place_sql('place')}, event_id, time_ms, {names}, place "
                f"FROM {self.sql_name} WHERE counts"
            )
        for number, over in enumerate(self.indexes + ((self.once,) if self.once else ())):
            yield f"CREATE INDEX {self.sql_name}_{number} ON {self.sql_name} ({', '.join(over)})"

    def insert(self) -> str:
        """Return the SQL statement that inserts a row. Its parameters are place, event_id, time_ms and the columns."""
        width = len(self.columns) + 3
        marks = ", ".join(f"?{number}" for number in range(1, width + 1))
        if self.topic is None:
            raise ValueError(f"{self.name} is made, not recorded")
        names = [each.name for each in self.columns]
        same = " AND ".join(f"{name} = ?{names.index(name) + 4}" for name in self.once)
        counts = f"NOT EXISTS (SELECT 1 FROM {self.sql_name} WHERE {same})" if self.once else "1"
        return f"INSERT INTO {self.sql_name} VALUES ({marks}, {counts})"


RUNS = Table(
    "runs", "What the run is: RunConfigured once, then each RunPlanned.",
    _columns("""
        kind TEXT RunConfigured | RunPlanned
        run_id TEXT Of the run.
        settings TEXT JSON of RunConfigured: the settings that folds depend on.
        fold_version TEXT Of RunConfigured.
        parent TEXT JSON of RunConfigured: the run and the checkpoint that a fork began from; null without one.
        draws INTEGER Of RunPlanned: draws to train.
        publish_every INTEGER Of RunPlanned.
        phase TEXT Of RunPlanned: running | paused | closed; empty leaves it.
        code TEXT Version of turnlog that wrote the record; null in older records.
    """),
    topics.RUNS,
)  # fmt: skip
ROLLOUTS = Table(
    "rollouts", "Rollouts that the feeder asked for.",
    _columns("""
        rollout_id TEXT Of the rollout.
        group_id TEXT Its group.
        rollout_index INTEGER In the group, from 0.
        group_size INTEGER Rollouts of the group.
        task_id TEXT Of the task.
        draw INTEGER Which drawing of the task the group is, from 0.
        dataset TEXT File name, "@", 16 hex digits of its sha256.
        dataset_epoch INTEGER Passes before this one.
        dataset_row INTEGER From 0.
        recipe TEXT Name of the recipe.
        purpose TEXT train | eval | other
        task TEXT The dataset row, JSON; null where it is large: it stands at the record's place.
        min_weight_version INTEGER None older may sample for it.
        code TEXT As in runs: of the feeder.
    """),
    topics.TASKS, ("rollout_id",), (("group_id",),),
)  # fmt: skip
SPINE = Table(
    "session_events", "Records of agent.sessions, all of them: what decides about sessions and groups.",
    _columns("""
        kind TEXT Name of the record.
        group_id TEXT Its group.
        session_id TEXT Its session; null of GroupClosed and SkipRequested.
        value BLOB The record as it stands on the log.
        code TEXT As in runs: of a gateway or runner; null of records that do not say it.
    """),
    topics.SESSIONS, (), (("group_id",), ("session_id", "kind", "code")),
)  # fmt: skip
TURNS = Table(
    "turns", "Generations by the policy, as people read them; the first record of a turn counts.",
    _columns("""
        group_id TEXT Its group.
        session_id TEXT Its session.
        epoch TEXT With turn_index the turn's name: event_id of what opened the epoch.
        turn_index INTEGER In the epoch, from 0.
        base_epoch TEXT With base_index the turn that the request continues; null for a root.
        base_index INTEGER See base_epoch.
        agent_path TEXT Who asked: empty or main, side..., player/NAME, .../compaction, or a sub-agent.
        api TEXT chat | responses | messages
        messages TEXT JSON: the request's messages beyond those of the base; null where they are large.
        response TEXT JSON: the assistant message; null where it is large.
        tools TEXT JSON: tool schemas, where they differ from the base's and are not large.
        finish_reason TEXT stop | tool_calls | length | abort | error
        aborted INTEGER 1: the client was gone, or the engine failed, before the end.
        ill_formed_calls INTEGER Blocks that look like tool calls and are none.
        redacted TEXT JSON: masked secrets in messages, tools and response by kind; null without any.
        prompt_tokens INTEGER Of the whole prompt.
        output_tokens INTEGER Sampled.
        reasoning_tokens INTEGER Of the output.
        cached_tokens INTEGER Of the prompt.
        version_first INTEGER Weight version of the first token.
        version_last INTEGER Of the last one.
        queue_s REAL Until an engine was chosen.
        first_token_s REAL From the request to the first token.
        total_s REAL From the request to the record.
        engine_id TEXT That sampled last.
        traceparent TEXT The agent's span that asked, 00-TRACE-SPAN-00; empty where the request named none.
    """),
    topics.TURNS, ("session_id", "epoch", "turn_index"),
    (("group_id",), ("time_ms", "engine_id", "total_s", "queue_s", "counts"), ("redacted",)),
)  # fmt: skip
SNAPSHOTS = Table(
    "snapshots", "Tokens of turns, by reference: ids and log-probs stand at the record's place.",
    _columns("""
        group_id TEXT Its group.
        session_id TEXT Its session.
        epoch TEXT As in turns.
        turn_index INTEGER As in turns.
        output_tokens INTEGER Sampled.
        version_spans TEXT JSON: [[version, length], ...] over the output.
        boundary TEXT root | append | branch
        boundary_reason TEXT Why.
        temperature REAL Of sampling.
        constrained INTEGER 1: an engine's grammar chose among the tokens.
        redacted INTEGER 1: ids that would show secrets are withheld.
    """),
    topics.SNAPSHOTS, ("session_id", "epoch", "turn_index"), (),
)  # fmt: skip
REQUESTS = Table(
    "tool_requests", "Tool calls as they were asked for. See tool_calls for both ends of a call.",
    _columns("""
        call_id TEXT Of the call.
        group_id TEXT Its group.
        session_id TEXT Its session.
        rollout_id TEXT Its rollout.
        call_seq INTEGER Of the session, from 0.
        tool TEXT Its name.
        arguments TEXT JSON.
        backend TEXT Of the sandbox.
    """),
    topics.TOOL_CALLS, ("call_id",), (("session_id", "call_seq"),),
)  # fmt: skip
CANCELS = Table(
    "tool_cancels", "Calls that nobody waits for any more.",
    _columns("""
        call_id TEXT Of the call.
        session_id TEXT Its session.
        reason TEXT In a word.
    """),
    topics.TOOL_CALLS, ("call_id",),
)  # fmt: skip
STARTS = Table(
    "tool_starts", "Executions of calls: on the log before they begin.",
    _columns("""
        call_id TEXT Of the call.
        session_id TEXT Its session.
        attempt INTEGER From 1.
        worker TEXT Which one.
        environment_sha256 TEXT Of what it runs in.
        code TEXT As in runs: of the sandbox worker.
    """),
    topics.TOOL_RESULTS, (), (("session_id", "code"), ("call_id",)),
)  # fmt: skip
RESULTS = Table(
    "tool_results", "Answers to calls; the first of a call counts.",
    _columns("""
        call_id TEXT Of the call.
        session_id TEXT Its session.
        call_seq INTEGER As in tool_requests.
        status TEXT ok | tool_error | timeout | resource_limit | refused | cancelled | infra_error
        reason TEXT Empty for ok.
        exit_code INTEGER Of the program.
        output TEXT What the agent saw, UTF-8 with replacements.
        output_bytes INTEGER Of it; of all of it where it was cut.
        full_output TEXT sha256 of the object that holds all of it, where it was cut.
        duration_s REAL That it ran.
        queue_s REAL From the request to the start.
        attempt INTEGER How often it was started.
        worker TEXT Which one.
        cached INTEGER 1: a repeat of an answer that was on the log.
        requests INTEGER What it asked of the network.
        refused_requests INTEGER Of them, refused ones.
        asked TEXT JSON: method, URL, status and source of its first 100 network requests.
    """),
    topics.TOOL_RESULTS, ("call_id",),
    (("session_id",), ("counts", "status", "reason"), ("duration_s", "place"), ("queue_s", "place"),
     ("time_ms", "worker", "duration_s", "counts")),
)  # fmt: skip
TREES = Table(
    "trees", "Sessions as trees of turns, with their books.",
    _columns("""
        group_id TEXT Its group.
        session_id TEXT The session.
        rollout_id TEXT Its rollout.
        outcome TEXT As in sessions.
        reward REAL The verdict.
        nodes TEXT JSON: [{"turn": [epoch, index], "base": ..., "lineage": n, "prompt": n, "output": n}, ...]
        lineages TEXT JSON: kinds by id: main | player | sub_agent | side_call | compaction
        segments TEXT JSON: [{"turns": [[epoch, index], ...], "tokens": n, "trained": n, "context": n}, ...]
        anchor_segment INTEGER The one that the reward is about.
        sampled INTEGER Output tokens.
        trained INTEGER Of them, those that the tree does not mask.
        masked TEXT JSON: reason -> tokens
        duplicated_prefix_tokens INTEGER Context that another segment holds already.
    """),
    topics.TREES, ("session_id",), (("group_id",),),
)  # fmt: skip
SAMPLES = Table(
    "samples", "Training rows. Their tokens stand at the record's place.",
    _columns("""
        sample_id TEXT Of the row.
        group_id TEXT Its group.
        session_id TEXT Its session.
        segment_index INTEGER In the session, from 0.
        is_anchor INTEGER 1: it holds the last turn of the main lineage.
        tokens INTEGER Of the whole sequence.
        sampled INTEGER Output tokens.
        trained INTEGER Of them, those that the tree lets train.
        advantage REAL Of the trajectory.
        reward REAL Of the trajectory.
        version_min INTEGER Oldest among the spans that train.
        version_max INTEGER Newest.
        mask TEXT 16 hex digits that name which tokens the tree lets train.
    """),
    topics.SAMPLES, ("sample_id",), (("session_id",), ("group_id",)),
)  # fmt: skip
SCORES = Table(
    "group_scores", "What became of groups that are settled.",
    _columns("""
        group_id TEXT The group.
        task_id TEXT Its task.
        purpose TEXT train | eval | other
        status TEXT trained | discarded | not_training
        reason TEXT Why it is discarded.
        baseline REAL That the estimator took off.
        std REAL Of the rewards.
        estimator TEXT name/version
        filters TEXT JSON.
        transforms TEXT JSON.
        samples INTEGER Training rows.
        sampled INTEGER Output tokens.
        trained INTEGER Of them, those that nothing masks so far.
        masked TEXT JSON: reason -> tokens
        rollouts TEXT JSON: members by index: [{"session_id", "outcome", "reward", "advantage", "excluded", "players"?}]
        code TEXT As in runs: of the assembler.
    """),
    topics.SAMPLES, ("group_id",), (("group_id", "counts", "code"),),
)  # fmt: skip
SAMPLE_SCORES = Table(
    "sample_scores", "Samples that a teacher or a reference has scored.",
    _columns("""
        sample_id TEXT Of the row.
        group_id TEXT Its group.
        scorer TEXT Name of the model.
    """),
    topics.SCORES, ("sample_id", "scorer"),
)  # fmt: skip
BATCHES = Table(
    "batches", "What one optimizer step eats, and draws that left nothing.",
    _columns("""
        batch_index INTEGER Of the run, from 0.
        draw_index INTEGER Of the run, from 0.
        part INTEGER Of the draw's batches; null of a skipped draw.
        parts INTEGER Batches of the draw; null of a skipped draw.
        skipped TEXT Why the draw left nothing; null of a batch.
        file_sha256 TEXT Of the file of rows.
        rows INTEGER Rows.
        prompts INTEGER Groups with a trained token.
        trajectories INTEGER Trajectories with one.
        trained_tokens INTEGER That carry loss.
        tokens INTEGER Of all rows.
        masked TEXT JSON: reason -> tokens that the batcher masked
        trainer_version INTEGER That the trainer was to hold.
        max_lag INTEGER Among trained tokens.
        lags TEXT JSON: weight version -> lag
        code TEXT As in runs: of the batcher.
    """),
    topics.BATCHES, ("batch_index",),
)  # fmt: skip
STEPS = Table(
    "steps", "Optimizer steps; of a batch's several the one of the highest incarnation counts.",
    _columns("""
        batch_index INTEGER Of the batch.
        draw_index INTEGER Of the draw.
        incarnation INTEGER Of the trainer.
        step INTEGER Steps so far.
        loss REAL Of the batch.
        grad_norm REAL Before clipping.
        learning_rate REAL Of this step.
        lag_max INTEGER Among trained tokens.
        tokens INTEGER Of all rows.
        trained_tokens INTEGER That carry loss.
        masked TEXT JSON: reason -> tokens that the step masked
        skipped INTEGER 1: the gradient was not finite.
        reward_mean REAL Over trajectories.
        logprob_gap_max REAL Trainer against engine, nats.
        logprob_gap_mean REAL The same, mean.
        entropy REAL Nats.
        clip_fraction REAL Of trained tokens.
        seconds TEXT JSON: phase -> seconds
        metrics TEXT JSON: what the algorithm measured
        world_size INTEGER Ranks.
        code TEXT As in runs: of the trainer.
    """),
    topics.STEPS, (), (("batch_index",),),
)  # fmt: skip
VERSIONS = Table(
    "versions", "Published weights. A version with two records has state, files and checkpoint of the second.",
    _columns("""
        version INTEGER Never reused.
        step INTEGER Optimizer steps behind it.
        batch_index INTEGER Last one trained; -1 of the first weights.
        incarnation INTEGER Of the trainer.
        kind TEXT full | delta | adapter
        base_version INTEGER Of a delta or an adapter.
        bytes INTEGER Of its files.
        files INTEGER How many; 0 while it is only announced.
        checkpoint TEXT That holds the same weights.
        state TEXT announced (no file holds it) | durable
        transport TEXT store | direct: engines loaded files, or training ranks sent them the tensors.
        stored_ms INTEGER Time of the second record, which names the files; null without one.
        started_from TEXT Model folder of the weights before the first step; empty of others, and in older records.
        code TEXT As in runs: of the trainer.
    """),
    topics.WEIGHTS, ("version",),
)  # fmt: skip
ENGINES = Table(
    "engine_events", "What weight loaders say of engines: joined, loaded, refused, drained, gone.",
    _columns("""
        kind TEXT Name of the record.
        engine_id TEXT Of the engine.
        engine_kind TEXT sglang | vllm
        url TEXT Where it is.
        state TEXT starting | serving | draining | gone
        version INTEGER Served.
        refused_version INTEGER Of EngineWeightsRefused.
        cause TEXT Why it was refused, or is gone.
        message TEXT Of EngineWeightsRefused.
        seconds TEXT JSON of EngineWeightsLoaded: phase -> seconds
        code TEXT As in runs: of the weight loader; null of records that do not say it.
    """),
    topics.ENGINES, (), (("engine_id",),),
)  # fmt: skip
DEAD_LETTERS = Table(
    "dead_letters", "Records that were refused.",
    _columns("""
        of_topic TEXT Where the refused record stands.
        of_partition INTEGER There.
        of_offset INTEGER There.
        of_key TEXT As it stands there, UTF-8 with replacements.
        role TEXT That refused it.
        cause TEXT The error's class.
        message TEXT What, where, and what to do.
    """),
    topics.DEAD_LETTERS, ("of_topic", "of_partition", "of_offset"), (("of_key",),),
)  # fmt: skip

SESSIONS = Table(
    "sessions", "Sessions as far as the log tells: the fold of agent.sessions, and sums over the other tables.",
    _columns("""
        session_id TEXT Of the session.
        group_id TEXT Its group.
        rollout_id TEXT Its rollout.
        rollout_index INTEGER In the group, from 0.
        attempt INTEGER At the rollout, from 0.
        task_id TEXT Of the task.
        recipe TEXT Name of the recipe.
        purpose TEXT train | eval | other
        agent TEXT name/version
        model TEXT That the gateway serves.
        environment TEXT name/version
        origin TEXT Key of its row in origins; null without a SessionStarted.
        epochs INTEGER Gateways that owned it.
        started_ms INTEGER Of SessionStarted, ms since 1970; 0 where it is not there.
        finished_ms INTEGER Of the counting SessionFinished; null before.
        outcome TEXT completed | truncated | agent_error | infra_failure | expired | cancelled; null before.
        reason TEXT Why it ended.
        final INTEGER 0: the runner tries the rollout again.
        settled INTEGER 1: finished and judged.
        reward REAL The verdict.
        components TEXT JSON: parts of the reward.
        verifier TEXT name/version
        verifier_failure TEXT Why it could not judge.
        erased_ms INTEGER Time at which its content was erased; null if it was not.
        erased_by TEXT Who erased it.
        turns INTEGER Recorded.
        calls INTEGER Tool calls.
        failed_calls INTEGER Of them, those that did not end ok.
        output_tokens INTEGER Sampled.
        context_tokens INTEGER Prompt and output of its longest turn.
        engines TEXT JSON: ids of the engines that sampled for it.
        version_min INTEGER Oldest weights that sampled for it.
        version_max INTEGER Newest.
        advantage REAL Of its samples.
        excluded TEXT Why the group's score leaves it out.
        trained_tokens INTEGER In rows of batches that count; length cut and version mask are behind it.
        batch_index INTEGER First batch that has a row of it.
        fate TEXT What became of it, see below.
    """),
    key="session_id",
    indexes=(
        ("group_id",), ("started_ms", "session_id"), ("reward", "session_id"), ("output_tokens", "session_id"),
        ("turns", "session_id"), ("calls", "session_id"), ("finished_ms", "session_id"),
        ("recipe", "started_ms", "session_id"), ("task_id", "started_ms", "session_id"),
        ("outcome", "started_ms", "session_id"), ("fate", "started_ms", "session_id"),
        ("batch_index", "started_ms", "session_id"), ("version_min", "started_ms", "session_id"),
    ),
)  # fmt: skip
ORIGINS = Table(
    "origins", "What sessions ran on and with, each combination once: what their SessionStarted say beside their task.",
    _columns("""
        origin TEXT 16 hex digits of the sha256 of the other columns.
        recipe TEXT Text of the task source.
        agent TEXT name/version
        environment TEXT name/version
        image TEXT Of the sandbox; null for the worker's own root.
        root_sha256 TEXT Of the files that tools see.
        policy_sha256 TEXT Of backend, limits and network rules.
        packages TEXT JSON: package -> version
        tools TEXT JSON: tool -> version
        tokenizer_sha256 TEXT Of tokenizer.json.
        chat_template_sha256 TEXT Of the chat template.
    """),
    key="origin",
)  # fmt: skip
GROUPS = Table(
    "groups", "Groups as far as the log tells.",
    _columns("""
        group_id TEXT Of the group.
        task_id TEXT Its task.
        recipe TEXT Name of the recipe.
        purpose TEXT train | eval | other
        group_size INTEGER Rollouts.
        sessions INTEGER That the log mentions, retries among them.
        members TEXT JSON: sessions that settled it; null before.
        started_ms INTEGER Of its first SessionStarted; 0 where there is none.
        status TEXT open | settled | trained | discarded | not_training
        reason TEXT Why it is discarded.
        reward_mean REAL Of members with a reward that are not excluded.
        draw_index INTEGER First draw that took it.
    """),
    key="group_id",
    indexes=(("started_ms", "group_id"), ("status", "started_ms", "group_id"), ("task_id", "started_ms", "group_id")),
)  # fmt: skip
BATCH_ROWS = Table(
    "batch_rows", "Rows of batches, in canonical order.",
    _columns("""
        batch_index INTEGER Of the batch.
        row INTEGER In it, from 0.
        sample_id TEXT Of the row.
        group_id TEXT Its group.
        session_id TEXT Its session.
        segment_index INTEGER In the session.
        tokens INTEGER After the length cut.
        trained_tokens INTEGER That carry loss.
        weight_divisor INTEGER Each trained token weighs 1 / weight_divisor.
    """),
    key="batch_index, row",
    indexes=(("session_id", "batch_index", "trained_tokens", "group_id"), ("sample_id",), ("group_id",)),
)  # fmt: skip
DROPS = Table(
    "batch_drops", "Samples of draws that no batch trains.",
    _columns("""
        batch_index INTEGER Of part 0 of the draw.
        draw_index INTEGER Of the draw.
        sample_id TEXT Of the row.
        group_id TEXT Its group.
        reason TEXT stale | length_cut | version_mask | discarded_group | raw_logprobs
        sampled_tokens INTEGER That would have trained.
    """),
    key="batch_index, sample_id",
    indexes=(("sample_id",), ("group_id",)),
)  # fmt: skip
DRAWN = Table(
    "batch_groups", "Groups of draws.",
    _columns("""
        batch_index INTEGER Of the batch.
        group_id TEXT In it; part 0 names those that fell out whole, too.
        draw_index INTEGER Of the draw.
    """),
    key="batch_index, group_id",
    indexes=(("group_id",),),
)  # fmt: skip
UNREAD = Table(
    "unread", "Records that are on the log and in no table: what they are not, by class of the error.",
    _columns("""
        topic TEXT Where it stands.
        partition INTEGER There.
        offset INTEGER There.
        time_ms INTEGER Of the record.
        cause TEXT UndecodableRecord | ForeignRun | WrongTopic | KeyMismatch | LaterKind | class of a defect
        message TEXT In words.
    """),
    key="topic, partition, offset",
)  # fmt: skip
FLAGS = Table(
    "flags", "What detectors of cheating found in rewarded sessions, each by itself (docs/cheating.md).",
    _columns("""
        session_id TEXT Of the session.
        number INTEGER Of the finding in the session, from 0.
        detector TEXT Its name.
        severity TEXT medium | high
        says TEXT In words.
        turn_number INTEGER The turn that shows it, in log order from 0; null if none does.
        call_id TEXT Of the tool call that shows it; empty if it is none.
        excerpt TEXT From the record, without secrets.
    """),
    key="session_id, number",
    indexes=(("detector",),),
)  # fmt: skip
SOLUTIONS = Table(
    "solutions", "What rewarded sessions wrote, for comparison with each other.",
    _columns("""
        session_id TEXT Of the session.
        task_id TEXT Of the task.
        recipe TEXT Name of the recipe.
        reward REAL The verdict.
        ended_ms INTEGER Of the first reward, ms since 1970.
        solution TEXT Hash of what it wrote; empty if nothing.
        solution_size INTEGER Characters of it without white space.
        sketch TEXT JSON: hashes by which prompts are compared.
        turn_number INTEGER Its last turn, in log order from 0; null without one.
    """),
    key="session_id",
    indexes=(("ended_ms", "session_id"),),
)  # fmt: skip
POSITIONS = Table(
    "positions", "As of: of each partition the first record that is not in here.",
    _columns("""
        topic TEXT Of the catalogue.
        partition INTEGER Of the topic.
        position INTEGER Offset.
    """),
    key="topic, partition",
)  # fmt: skip
ABOUT = Table(
    "about", "What this file is.",
    _columns("""
        name TEXT run_id | fold_version | turnlog | written_ms | detectors (JSON) | flagged_above
        value TEXT Of it.
    """),
    key="name",
)  # fmt: skip

RECORDED = (
    RUNS, ROLLOUTS, SPINE, TURNS, SNAPSHOTS, REQUESTS, CANCELS, STARTS, RESULTS, TREES, SAMPLES, SCORES, SAMPLE_SCORES,
    BATCHES, STEPS, VERSIONS, ENGINES, DEAD_LETTERS,
)  # fmt: skip
MADE = (SESSIONS, ORIGINS, GROUPS, BATCH_ROWS, DROPS, DRAWN, UNREAD, FLAGS, SOLUTIONS, POSITIONS, ABOUT)
TOOL_CALLS = """CREATE VIEW tool_calls AS SELECT
    r.call_id, r.session_id, r.group_id, r.call_seq, r.tool, r.arguments, r.backend, r.time_ms AS requested_ms,
    coalesce(a.status, CASE WHEN c.call_id IS NULL THEN 'open' ELSE 'cancelled' END) AS status,
    coalesce(a.reason, c.reason) AS reason, a.exit_code, a.output, a.output_bytes, a.full_output, a.duration_s,
    a.queue_s, a.attempt, a.worker, a.cached, a.requests, a.refused_requests, a.time_ms AS answered_ms,
    r.place AS request_place, a.place AS result_place
    FROM tool_requests_records r
    LEFT JOIN tool_results_records a ON a.call_id = r.call_id AND a.counts
    LEFT JOIN tool_cancels_records c ON c.call_id = r.call_id AND c.counts WHERE r.counts"""
SEARCH = "CREATE VIRTUAL TABLE search USING fts5(text, content='', tokenize='unicode61 remove_diacritics 2')"
"""Full-text index over messages and tool outputs, by place. The text itself is in the row at that place."""


def statements() -> Sequence[str]:
    """Return the SQL statements that create an empty index."""
    return [*(each for table in (*RECORDED, *MADE) for each in table.statements()), TOOL_CALLS, SEARCH]
