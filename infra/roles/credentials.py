"""A session's token on its way through the log, from the runner to the worker of the call that may speak with it.

The log is read by many, so what stands in a record is sealed: AES-256-GCM under a key that HKDF (RFC 5869) derives from
[sandbox] credential_key, bound to its call. In the arguments of another call it opens nothing.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import TYPE_CHECKING

from turnlog.infra.run_folder import CREDENTIAL_KEY, kept_secret, present

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
PURPOSE = b"turnlog session token in a tool call"


class CredentialUnusable(Exception):
    """A sealed token that no key of ours opens for this call."""


class CredentialKeys:
    """What seals and opens them: [sandbox] credential_key as it is now, else the run's own."""

    def __init__(self, configured: str, directory: Path) -> None:
        """`configured`: the first key seals, every one opens. Empty: that of the run's directory, made when it is not
        there."""
        self._keys = configured or kept_secret(directory / CREDENTIAL_KEY)

    def sealed(self, token: str, call_id: str) -> str:
        """The token, for the worker of this call alone."""
        nonce = os.urandom(NONCE_BYTES)
        [first, *_] = self._ciphers()
        return base64.b64encode(nonce + first.encrypt(nonce, token.encode(), call_id.encode())).decode()

    def opened(self, sealed: str, call_id: str) -> str:
        """What `sealed` was given. Raises CredentialUnusable."""
        from cryptography.exceptions import InvalidTag

        for cipher in self._ciphers():
            try:
                content = base64.b64decode(sealed, validate=True)
                return cipher.decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], call_id.encode()).decode()
            except (InvalidTag, binascii.Error, ValueError):
                continue
        raise CredentialUnusable(
            "the token of its session does not open: runners and sandbox workers share [sandbox] credential_key "
            f"(TURNLOG_SANDBOX_CREDENTIAL_KEY_FILE), or the run's directory with its {CREDENTIAL_KEY}"
        )

    def _ciphers(self) -> list[AESGCM]:
        # imported here, since it takes longer than all that most processes do with it
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        keys = (key.encode() for key in present(self._keys).split())
        return [AESGCM(HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(key)) for key in keys]
