"""Records of a training server with tenants (docs/tinker.md): the commands of its clients, and their results.

One partition holds all commands of a run, so their order is total. A model is a tenant: one low-rank adapter on the
run's base model, with its gradients and its optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.types import Float32Payload, Int32Payload, Int32s, Json, RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCommandReceived(RunEvent):
    """A client's request, before it is executed. Of several records with one request_id, the first counts."""

    request_id: str
    """Id that the client's own identifiers give, so that a request that is sent again has the same one."""
    owner: str
    """First 16 hex digits of the sha256 of the API key."""
    command: str
    """create_session, create_model, forward, forward_backward, optim_step, save_weights, save_weights_for_sampler,
    load_weights, create_sampling_session, sample, delete_checkpoint or finish_session."""
    session_id: str
    """Session of the client."""
    model_id: str = ""
    """Model that the command concerns; empty if it concerns none."""
    sequence: int = -1
    """Number of the command among those of its model, which are executed in this order without a gap; -1 if the
    command is executed when it is read."""
    arguments: Json = b"{}"
    """The other fields of the request, as canonical JSON."""
    row_lengths: Int32s = b""
    """Tokens of each row (datum) of forward and forward_backward; of sample, the length of the prompt."""
    tokens: Int32Payload = b""
    """Token ids of all rows, one row after the other."""
    targets: Int32Payload = b""
    """Target token of each token."""
    weights: Float32Payload = b""
    """Loss weight of each target; empty if the rows have none."""
    logprobs: Float32Payload = b""
    """Log-prob with which each target was sampled; empty if the rows have none."""
    advantages: Float32Payload = b""
    """Advantage of each target; empty if the rows have none."""
    refusal: str = ""
    """Why the request cannot be executed; it then fails with this message in its place among the commands of its
    model. Empty for a valid request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCommandCompleted(RunEvent):
    """The result of a command. There is one for each command that is executed."""

    request_id: str
    """Id of the command that it is the result of."""
    command: str
    """Kind of the command, as in TenantCommandReceived."""
    outcome: str
    """succeeded or failed."""
    error: str = ""
    """Error message; empty if the command succeeded."""
    category: str = ""
    """user or server: who can remove the cause of the error; empty if the command succeeded."""
    answer: Json = b"{}"
    """Small results, as canonical JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of forward, forward_backward and optim_step."""
    row_lengths: Int32s = b""
    """Tokens of each row: of the training rows, or of the sampled sequences."""
    tokens: Int32Payload = b""
    """Sampled token ids of all sequences, one after the other; empty for training."""
    logprobs: Float32Payload = b""
    """Natural logarithm of the probability of each target, or of each sampled token."""
    prompt_logprobs: Float32Payload = b""
    """Natural logarithm of the probability of each prompt token, NaN for the first; empty if none were requested."""
    stop_reasons: tuple[str, ...] = ()
    """Why each sampled sequence ended: stop or length."""
    files: tuple[WeightFile, ...] = ()
    """Files of the saved weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStateSaved(RunEvent):
    """A snapshot of all models, with gradients and optimizer states. A restart executes only what follows it."""

    executed: int
    """Number of ordered commands that were executed before it, in the order that the commands' topic gives."""
    folder: str
    """Prefix of the objects of its files in the store."""
    files: tuple[WeightFile, ...]
    """Names, sizes and hashes of its files. The server removes them once two later snapshots exist."""
