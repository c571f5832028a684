"""A session that your own service opens for a rollout of its own agent, at a gateway of the run (docs/outside.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from turnlog.client.errors import SessionRefused
from turnlog.infra.roles.http_clients import direct_blocking
from turnlog.infra.roles.tls import trusting
from turnlog.infra.run_folder import GATEWAY_KEY, present, read_endpoints, read_secret
from turnlog.schemas.events import Outcome
from turnlog.settings import Settings

TIMEOUT_S = 60.0


class OutsideSession:
    """An open session, as a context manager and blocking: give `base_url` and `agent_token` to the agent, and keep the
    rest. Leaving the block finishes the session if `finish` was not called: as completed, or as infra_failure after an
    error, which never trains.

    Every request may be repeated: the first one counts. Raises SessionRefused, and httpx.TransportError if the gateway
    does not answer.
    """

    def __init__(self, settings: Settings, opening: dict[str, Any]) -> None:
        """See `ClientRun.session`. Raises NoEndpoints, SecretUnusable, TlsFileUnusable."""
        directory = Path(settings.run.directory)
        self._url = settings.gateway.url or read_endpoints(directory).gateway
        key = settings.gateway.signing_key or read_secret(directory / GATEWAY_KEY)
        if not key:
            raise SessionRefused(
                f"{directory / GATEWAY_KEY} is missing and [gateway] signing_key is empty: only the holder of the "
                "gateway's signing key opens sessions"
            )
        self._key, self._opening = present(key), opening
        trusted = trusting(self._url, settings.gateway.ca_file, "gateway")
        self._http = direct_blocking(verify=trusted, timeout=TIMEOUT_S)
        self._finished = False
        self.session_id = ""
        self.base_url = ""
        """Base URL for clients of the API that the agent speaks."""
        self.agent_token = ""
        """API key for the agent: it requests turns, and nothing else."""
        self.token = ""
        """Token of whoever judges: also for rewards and the end."""

    def __enter__(self) -> Self:
        try:
            found = self._post(f"{self._url.rstrip('/')}/sessions", self._key, self._opening)
        except BaseException:
            self._http.close()
            raise
        self.session_id, self.base_url = found["session_id"], found["base_url"]
        self.agent_token, self.token = found["agent_token"], found["token"]
        self._finished = found["finished"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if not self._finished:
                outcome = Outcome.completed if kind is None else Outcome.infra_failure
                self.finish(outcome.value, reason="" if error is None else f"{type(error).__name__}: {error}"[:200])
        finally:
            self._http.close()

    def reward(self, value: float, **more: Any) -> None:
        """Report the reward of the session. `more` are the other fields of REWARD in the gateway's /openapi.json, such
        as `evidence` or `player`.
        """
        self._post(self._path("reward"), self.token, {"value": value, **more})

    def finish(self, outcome: str, *, reward: float | dict[str, Any] | None = None, **more: Any) -> None:
        """Finish the session with an Outcome. `reward` is a number or the fields of REWARD; `more` are the other fields
        of FINISH, such as `expects`.
        """
        verdict = {} if reward is None else {"reward": reward if isinstance(reward, dict) else {"value": reward}}
        self._post(self._path("finish"), self.token, {"outcome": outcome, **verdict, **more})
        self._finished = True

    def _path(self, verb: str) -> str:
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/sessions/{self.session_id}/{verb}"

    def _post(self, url: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(url, json=body, headers={"authorization": f"Bearer {token}"})
        if answer.is_error:
            raise SessionRefused(f"POST {url}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.content else {}
