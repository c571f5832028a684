"""Calls of the Tinker API as commands: which fields they have, and what this server does not offer.

Request bodies are those of tinker 0.38 (`types/*_request.py`). Fields that only the hosted service uses (project_id,
sdk_version) are recorded with the session and have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

from turnlog.plugins.tinker import BadCall, SessionClosed, UnknownObject
from turnlog.plugins.tinker.executor import json_bytes
from turnlog.plugins.tinker.history import ClientSession, History, SamplingSession, SavedWeights, TenantModel
from turnlog.plugins.tinker.sampling import check_sampling
from turnlog.plugins.tinker.wire import decode_training
from turnlog.schemas import ids
from turnlog.schemas.events import TenantCommandReceived
from turnlog.schemas.types import pack_float32s, pack_int32s
from turnlog.settings import Settings

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Body = Mapping[str, Any]
Owned = TypeVar("Owned", ClientSession, TenantModel, SavedWeights, SamplingSession)
MAX_TTL_S = 100 * 365 * 86400
"""Longest expiry of a checkpoint in seconds: its date must be one that calendars have."""
ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
ADAM_DEFAULTS = dict(zip(ADAM, (1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0), strict=True))
"""Defaults of AdamParams in tinker 0.38 (`types/optimizer.py`)."""


class CommandMaker:
    """Makes the commands of one API key. Every method raises BadCall, UnknownObject and SessionClosed."""

    def __init__(self, settings: Settings, history: History, owner: str, vocabulary: int) -> None:
        """`vocabulary`: number of token ids of the base model."""
        self._settings, self._history, self._owner, self._vocabulary = settings, history, owner, vocabulary

    def _command(
        self, command: str, session: str, key: tuple[str | int, ...], *, model: str = "", sequence: int = -1,
        arguments: Mapping[str, object] | None = None, **fields: Any,
    ) -> TenantCommandReceived:  # fmt: skip
        """Return a command whose request is identified by `key`."""
        run_id = self._settings.run.id
        request = ids.digest("tenant-command", run_id, self._owner, command, *key)
        return TenantCommandReceived(
            event_id=ids.digest("TenantCommandReceived", request),
            run_id=run_id,
            request_id=request,
            owner=self._owner,
            command=command,
            session_id=session,
            model_id=model,
            sequence=sequence,
            arguments=json_bytes(arguments or {}),
            **fields,
        )

    def find_session(self, session: str) -> ClientSession:
        """Return a session of this API key, also one that has finished."""
        return self._own(self._history.sessions.get(session), f"session {session[:200]!r}")

    def find_saved(self, path: str) -> SavedWeights:
        """Return saved weights of this API key."""
        return self._own(self._history.saved.get(path), path[:300])

    def find_sampler(self, name: str, kind: str) -> SamplingSession:
        """Return a sampling session of this API key; `kind` names it in the error."""
        return self._own(self._history.samplers.get(name), f"{kind} {name[:200]!r}")

    def _own(self, found: Owned | None, name: str) -> Owned:
        """Return what belongs to this API key; what belongs to another does not exist for it."""
        if found is None or found.owner != self._owner:
            raise UnknownObject(f"{name} does not exist")
        return found

    def check_session(self, session: object) -> str:
        """Return the id of an open session of this API key."""
        if self.find_session(str(session)).finished:
            raise SessionClosed(f"session {session} has finished")
        return str(session)

    def check_model(self, model: object) -> TenantModel:
        """Return a model of this API key."""
        return self._own(self._history.models.get(str(model)), f"model {str(model)[:200]!r}")

    def create_session(self, body: Body, idempotency: str) -> TenantCommandReceived:
        """A session. `idempotency`: the key that the client sends again with the same request."""
        kept = {name: body.get(name) for name in ("tags", "user_metadata", "sdk_version", "project_id", "display_name")}
        session = ids.digest("tenant-session", self._settings.run.id, self._owner, idempotency)
        return self._command("create_session", session, (idempotency,), arguments=kept)

    def create_model(self, body: Body) -> TenantCommandReceived:
        """A model of an open session."""
        session, number = self.check_session(body.get("session_id")), _whole(body, "model_seq_id")
        self.check_base(body.get("base_model"))
        _check_optimizer(body.get("optimizer_config"))
        lora = body.get("lora_config")
        if not isinstance(lora, dict):
            raise BadCall("lora_config is missing: only low-rank adapters are trained, not whole models")
        rank, most = lora.get("rank"), self._settings.tinker.max_rank
        if not _is_whole(rank) or not 1 <= rank <= most:
            raise BadCall(f"lora_config.rank is {rank!r}: it must be a number from 1 to {most} ([tinker] max_rank)")
        parts = {name: bool(lora.get(name, True)) for name in ("train_attn", "train_mlp", "train_unembed")}
        model = f"{session}:train:{number}"
        arguments = {"rank": rank, "seed": self._seed(lora.get("seed"), model), **parts, **_metadata(body)}
        return self._command("create_model", session, (session, number), model=model, arguments=arguments)

    def _seed(self, seed: object, model: str) -> int:
        if seed is None:  # a random one, which a repeated request has again
            return int(ids.digest("tenant-seed", model)[:8], 16)
        if not _is_whole(seed) or not 0 <= seed < 2**63:
            raise BadCall(f"lora_config.seed is {seed!r}: it must be a number from 0 on")
        return seed

    def check_base(self, name: object) -> None:
        """Check that a base model is the run's."""
        model = self._settings.model
        if name not in (model.name, model.path):
            raise BadCall(f"base model {str(name)[:200]!r} is not served: this server has {model.name!r}")

    def _of_model(
        self, command: str, body: Body, arguments: Mapping[str, object], refusal: str = "", **fields: Any
    ) -> TenantCommandReceived:
        """Return a command in its place among those of its model."""
        model = self.check_model(body.get("model_id"))
        session = self.check_session(model.session_id)
        name = str(body.get("model_id"))
        sequence = _whole(body, "seq_id")
        return self._command(
            command, session, (name, sequence), model=name, sequence=sequence, arguments=arguments, refusal=refusal,
            **fields,
        )  # fmt: skip

    def train(self, content: bytes) -> TenantCommandReceived:
        """forward or forward_backward. A request with bad rows fails in its place, since later ones are numbered."""
        call = decode_training(content)
        rows, command = call.rows, "forward_backward" if call.backward else "forward"
        fields: dict[str, Any] = {}
        if rows is not None:
            fields = {
                "row_lengths": pack_int32s(rows.lengths),
                **{name: pack_int32s(getattr(rows, name)) for name in ("tokens", "targets")},
                **{name: pack_float32s(getattr(rows, name)) for name in ("weights", "logprobs", "advantages")},
            }
        about = {"loss_fn": call.loss, "config": {} if call.refusal else call.config}
        body = {"model_id": call.model_id, "seq_id": call.sequence}
        return self._of_model(command, body, about, call.refusal, **fields)

    def optim_step(self, body: Body) -> TenantCommandReceived:
        """A step of AdamW."""
        refusal, values = "", dict(ADAM_DEFAULTS)
        given = body.get("adam_params", body.get("optim_params"))
        if not isinstance(given, dict):
            refusal = "adam_params are missing: AdamW is the only optimizer of this server"
        else:
            values |= {name: value for name, value in given.items() if value is not None}
            if others := sorted(values.keys() - set(ADAM)):
                refusal = f"adam_params {', '.join(others)} are unknown"
            elif bad := [name for name, value in values.items() if not _is_number(value)]:
                refusal = f"adam_params.{bad[0]} is {values[bad[0]]!r}: it must be a finite number"
        arguments = {} if refusal else {name: float(value) for name, value in values.items()}
        return self._of_model("optim_step", body, arguments, refusal)

    def save(self, command: str, body: Body) -> TenantCommandReceived:
        """save_weights or save_weights_for_sampler."""
        name, refusal = body.get("path"), ""
        sequence = _whole(body, "seq_id")
        arguments: dict[str, Any] = {
            "name": f"step-{sequence:06d}" if name is None else name,
            "overwrite": bool(body.get("overwrite")),
            "ttl_seconds": body.get("ttl_seconds"),
            **_metadata(body),
        }
        if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
            refusal = f"{str(name)[:100]!r} is no name of a checkpoint: use letters, digits, '.', '_' and '-'"
        if body.get("kind") == "inflight":
            refusal = "kind inflight is not supported: use snapshot"
        ttl = arguments["ttl_seconds"]
        if ttl is not None and not (_is_whole(ttl) and 1 <= ttl <= MAX_TTL_S):
            refusal = f"ttl_seconds is {str(ttl)[:50]!r}: it must be a number of seconds from 1 to {MAX_TTL_S}"
        if body.get("sampling_session_seq_id") is not None and name is None:
            session, number = self.check_model(body.get("model_id")).session_id, _whole(body, "sampling_session_seq_id")
            arguments["sampling_session_id"] = f"{session}:sample:{number}"
        if refusal:
            arguments |= {"name": "", "ttl_seconds": None}
        return self._of_model(command, body, arguments, refusal)

    def load(self, body: Body) -> TenantCommandReceived:
        """Load weights into a model, or into a new one."""
        path = str(body.get("path"))
        arguments: dict[str, Any] = {"path": path, "optimizer": bool(body.get("optimizer"))}
        if body.get("session_id") is None:
            return self._of_model("load_weights", body, arguments)
        session, number = self.check_session(body["session_id"]), _whole(body, "model_seq_id")
        if body.get("base_model") is not None:
            self.check_base(body["base_model"])
        _check_optimizer(body.get("optimizer_config"))
        saved = self.find_saved(path)
        model = f"{session}:train:{number}"
        parts = {name: saved.about[name] for name in ("rank", "train_attn", "train_mlp", "train_unembed")}
        arguments |= {**parts, "seed": self._seed(None, model), **_metadata(body)}
        return self._command("load_weights", session, (session, number), model=model, arguments=arguments)

    def create_sampling_session(self, body: Body) -> TenantCommandReceived:
        """A sampling session of saved weights or of the base model."""
        session, number = self.check_session(body.get("session_id")), _whole(body, "sampling_session_seq_id")
        path = body.get("model_path")
        if path is not None:
            self._check_sampled(str(path))
        else:
            self.check_base(body.get("base_model"))
        arguments = {"sampling_session_id": f"{session}:sample:{number}", "model_path": path}
        return self._command("create_sampling_session", session, (session, number), arguments=arguments)

    def _check_sampled(self, path: str) -> None:
        saved = self.find_saved(path)
        if saved.kind != "sampler_weights":
            raise BadCall(f"{path} was saved to be trained further: sample from what save_weights_for_sampler writes")

    def sample(self, body: Body) -> TenantCommandReceived:
        """A sample in a sampling session."""
        name = str(body.get("sampling_session_id"))
        found = self.find_sampler(name, "sampling session")
        tokens = _prompt_tokens(body.get("prompt"), self._vocabulary)
        about = check_sampling(body, len(tokens), self._settings.engine.context - 1)
        return self._command(
            "sample", self.check_session(found.session_id), (name, _whole(body, "seq_id")),
            arguments={"sampling_session_id": name, **about}, row_lengths=pack_int32s([len(tokens)]),
            tokens=pack_int32s(tokens),
        )  # fmt: skip

    def delete_checkpoint(self, path: str) -> TenantCommandReceived:
        """Forget saved weights."""
        if path not in self._history.saved:  # the same call again, if its answer was lost
            deletion = self._history.commands.get(self._history.deletions.get(path, ""))
            if deletion is not None and deletion.event.owner == self._owner:
                return deletion.event
        saved = self.find_saved(path)
        session = self._history.models[saved.model_id].session_id
        return self._command("delete_checkpoint", session, (saved.request_id,), arguments={"path": path})

    def finish_session(self, session: str, body: Body) -> TenantCommandReceived:
        """End a session and its models."""
        self.find_session(session)
        return self._command("finish_session", session, (session,), arguments={"reason": body.get("reason")})


def _whole(body: Body, name: str) -> int:
    value = body.get(name)
    if not _is_whole(value) or not 0 <= value < 2**53:
        raise BadCall(f"{name} is {str(value)[:50]!r}: it must be a number from 0 on")
    return value


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _metadata(body: Body) -> dict[str, Any]:
    return {"user_metadata": body.get("user_metadata")}


def _check_optimizer(config: object) -> None:
    if isinstance(config, dict) and config.get("type", "adamw") != "adamw":
        raise BadCall(f"optimizer {str(config.get('type'))[:50]!r} is not supported: use adamw")


def _prompt_tokens(prompt: object, vocabulary: int) -> list[int]:
    """Return the token ids of a prompt. SGLang does not check them, and dies of one that the model does not have."""
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise BadCall("prompt.chunks is missing")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise BadCall(f"prompt: {str(kind)[:50]} chunks are not supported: send encoded_text")
        part = chunk.get("tokens")
        if not isinstance(part, list):
            raise BadCall("prompt: a chunk of encoded_text has no list of tokens")
        tokens += part
    if not tokens:
        raise BadCall("prompt has no tokens")
    for at, token in enumerate(tokens):
        if not _is_whole(token) or not 0 <= token < vocabulary:
            raise BadCall(
                f"prompt has {str(token)[:50]!r} at position {at}: the model has tokens 0 to {vocabulary - 1}"
            )
    return tokens
