"""Session tokens in the log, encrypted by the runner for the worker of the tool call that may use them.

Many processes can read the log, so a record holds only the encrypted token: AES-256-GCM under a key that HKDF (RFC
5869) derives from [sandbox] credential_key, with the call id as associated data. In the arguments of another call it
cannot be decrypted.
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
    """The token cannot be decrypted for this call by any of the configured keys."""


class CredentialKeys:
    """Encrypts and decrypts session tokens with [sandbox] credential_key, which is read anew each time, or else with
    the run's own key."""

    def __init__(self, configured: str, directory: Path) -> None:
        """Use the keys in `configured`: the first one encrypts, all of them decrypt. If it is empty, use the key in the
        run's directory, which is created if it is missing."""
        self._keys = configured or kept_secret(directory / CREDENTIAL_KEY)

    def encrypt_token(self, token: str, call_id: str) -> str:
        """Encrypt the token so that only the worker of this call can decrypt it."""
        nonce = os.urandom(NONCE_BYTES)
        [first, *_] = self._ciphers()
        return base64.b64encode(nonce + first.encrypt(nonce, token.encode(), call_id.encode())).decode()

    def decrypt_token(self, sealed: str, call_id: str) -> str:
        """Decrypt a token that `sealed` has encrypted. Raises CredentialUnusable if no key decrypts it for this
        call."""
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
        # imported here: the import takes longer than everything that most processes do with it
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        keys = (key.encode() for key in present(self._keys).split())
        return [AESGCM(HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(key)) for key in keys]
