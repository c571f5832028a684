"""A corpus of texts with planted secrets, and of honest texts that look like some, from a seed.

No secret is real, and none stands in this file: each is put together from letters at run time, so that a scanner of
repositories finds nothing here. Numbers of telephones are those reserved for fiction, cards and accounts are the
published examples or random digits with a valid check digit, and addresses are below reserved domains.
"""

from __future__ import annotations

import base64
import json
import random
import re
import string
import uuid
from collections.abc import Callable
from typing import NamedTuple

LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
WORDS = [
    "the",
    "build",
    "of",
    "this",
    "branch",
    "runs",
    "before",
    "every",
    "merge",
    "and",
    "writes",
    "its",
    "report",
    "to",
    "a",
    "folder",
    "that",
    "the",
    "next",
    "step",
    "reads",
    "when",
    "a",
    "test",
    "fails",
    "look",
    "at",
    "the",
    "last",
    "lines",
    "first",
    "because",
    "they",
    "name",
    "the",
    "module",
    "and",
    "the",
    "value",
    "that",
    "was",
    "expected",
]
NAMES = ("worker", "billing", "search", "ledger", "catalog", "gateway", "reports", "mailer")


class Planted(NamedTuple):
    """A text with one secret."""

    text: str
    secret: str
    kind: str


class Corpus:
    """Makes texts from a seed: the same seed makes the same texts."""

    def __init__(self, seed: int = 39) -> None:
        self._random = random.Random(seed)

    def planted(self, count: int = 500) -> list[Planted]:
        """Return texts with one secret each, all kinds in turn."""
        makers = list(self._makers().items())
        return [self._plant(*makers[number % len(makers)]) for number in range(count)]

    def honest(self, count: int = 1000) -> list[str]:
        """Return texts without secrets, all kinds in turn."""
        texts = [self._fill(HONEST[number % len(HONEST)]) for number in range(count)]
        return [f"{self._prose()}\n{text}\n{self._prose()}" for text in texts]

    def _plant(self, label: str, maker: Callable[[], tuple[str, str]]) -> Planted:
        around, secret = maker()
        before, after = self._prose(), self._prose()
        kind = label.partition("/")[0]
        return Planted(f"{before}\n{around}\n{after}", secret, kind)

    def _pick(self, letters: str, length: int) -> str:
        return "".join(self._random.choices(letters, k=length))

    def _one(self, *of: str) -> str:
        return self._random.choice(of)

    def _prose(self) -> str:
        words = [self._random.choice(WORDS) for _ in range(self._random.randrange(8, 60))]
        return " ".join(words).capitalize() + "."

    def _key(self, length: int, letters: str = LETTERS) -> str:
        """Return a random word with at least two digits, a capital and a small letter, as far as the letters allow."""
        while True:
            word = self._pick(letters, length)
            few = sum(map(str.isdigit, word)) < 2
            if not few and (letters != LETTERS or (word.lower() != word and word.upper() != word)):
                return word

    def _password(self) -> str:
        shape = self._random.randrange(4)
        word = self._one(*NAMES).capitalize()
        if shape == 0:
            return f"{word}{self._random.randrange(10, 9999)}{self._one('!', '#', '_', '.')}"
        if shape == 1:
            return self._key(self._random.randrange(10, 24))
        if shape == 2:
            return f"{self._one(*NAMES)}-{self._key(6)}-{self._random.randrange(100)}"
        return self._pick(string.ascii_lowercase, 5) + self._pick(string.digits, 4)

    def _token(self) -> str:
        digits, key = string.digits, self._key
        makers = (
            lambda: "gh" + self._one("p", "o", "s") + "_" + key(36),
            lambda: "github" + "_pat_" + key(22) + "_" + key(59),
            lambda: "gl" + "pat-" + key(20),
            lambda: "xo" + f"xb-{self._pick(digits, 12)}-{self._pick(digits, 12)}-{key(24).lower()}",
            lambda: "sk" + "-ant-api03-" + key(48),
            lambda: "sk" + "-proj-" + key(40),
            lambda: "hf" + "_" + key(34),
            lambda: "np" + "m_" + key(36),
            lambda: "sk" + "_live_" + key(24),
            lambda: "SG" + "." + key(22) + "." + key(43),
            lambda: "pypi" + "-AgEIcHlwaS5vcmc" + key(90),
            lambda: self._pick(digits[1:], 9) + ":" + key(35),
            lambda: "do" + "p_v1_" + self._pick(HEX, 64),
        )
        return self._random.choice(makers)()

    def _pem(self, kind: str, line: str = "\n") -> str:
        body = base64.b64encode(self._random.randbytes(self._random.randrange(300, 1200))).decode()
        lines = [body[at : at + 64] for at in range(0, len(body), 64)]
        return line.join([f"-----BEGIN {kind}" + " KEY-----", *lines, f"-----END {kind}" + " KEY-----"])

    def _jwt(self) -> str:
        def part(value: object) -> str:
            return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

        head, claims = {"alg": "HS256", "typ": "JWT"}, {"sub": self._one(*NAMES), "exp": self._random.randrange(2**31)}
        return f"{part(head)}.{part(claims)}.{self._key(43)}"

    def _iban(self) -> str:
        bank, account = self._pick(string.digits, 8), self._pick(string.digits, 10)
        check = 98 - int(f"{bank}{account}131400") % 97
        plain = f"DE{check:02}{bank}{account}"
        spaced = " ".join(plain[at : at + 4] for at in range(0, len(plain), 4))
        return self._one(plain, spaced)

    def _card(self) -> str:
        digits = self._one("4", "51", "55", "4539") + self._pick(string.digits, 16)
        digits = digits[:15]
        total = sum(sum(divmod(int(one) * (2 - at % 2), 10)) for at, one in enumerate(digits))
        digits += str(-total % 10)
        parts = [digits[at : at + 4] for at in range(0, 16, 4)]
        return self._one("", " ", "-").join(parts)

    def _phone(self) -> str:
        line = f"555-01{self._random.randrange(100):02}"
        area = self._one("202", "415", "312", "617")
        return self._one(
            f"({area}) {line}",
            f"+1 {area}-{line}",
            f"{area}-{line}",
            f"+1 ({area}) {line}",
            f"+44 20 7946 0{self._random.randrange(100, 999)}",
            f"+49 30 23125 {self._random.randrange(100, 999)}",
            f"+33 1 99 00 {self._random.randrange(10, 99)} {self._random.randrange(10, 99)}",
        )

    def _email(self) -> str:
        user = self._one("ada", "lin.wu", "j_ortiz", "sam+ci", "maria-k") + self._pick(string.digits, 2)
        return user + "@" + self._one("mail.example", "corp.example.org", "example.com", "dept.uni.example")

    def _makers(self) -> dict[str, Callable[[], tuple[str, str]]]:
        """Return what makes a secret and the lines that it stands in, by kind and form."""

        def put(secret: Callable[[], str], forms: tuple[str, ...]) -> Callable[[], tuple[str, str]]:
            def make() -> tuple[str, str]:
                one = secret()
                return self._one(*forms).replace("%", one), one

            return make

        secrets: dict[str, Callable[[], str]] = {
            "cloud_key/id": lambda: "AK" + "IA" + self._pick(string.ascii_uppercase + "234567", 16),
            "cloud_key/secret": lambda: self._key(40, LETTERS + "/+"),
            "cloud_key/azure": lambda: self._key(86) + "==",
            "private_key/file": lambda: self._pem(self._one("RSA PRIVATE", "EC PRIVATE", "OPENSSH PRIVATE", "PRIVATE")),
            "private_key/json": lambda: self._pem("PRIVATE", "\\n"),
            "jwt/header": self._jwt,
            "token/known": self._token,
            "token/bearer": lambda: self._key(32, HEX),
            "password/assigned": self._password,
            "password/url": self._password,
            "password/option": self._password,
            "password/prose": self._password,
            "password/hex": lambda: self._key(40, HEX),
            "random/word": lambda: self._key(self._random.randrange(36, 60)),
            "email/address": self._email,
            "phone/number": self._phone,
            "iban/number": self._iban,
            "card/number": self._card,
        }
        return {name: put(secret, AROUND[name]) for name, secret in secrets.items()}

    def _fill(self, template: str) -> str:
        """Return a text in place of whose <hex:N>, <b64:N>, <lines:N>, <n:N>, <name> and <uuid> is what they name."""

        def value(match: re.Match[str]) -> str:
            kind, size = match[1], int(match[2] or 0)
            if kind == "hex":
                return self._pick(HEX, size)
            if kind == "n":
                return str(self._random.randrange(size))
            if kind == "name":
                return self._one(*NAMES)
            if kind == "uuid":
                return str(uuid.UUID(int=self._random.getrandbits(128)))
            body = base64.b64encode(self._random.randbytes(size)).decode()
            return body if kind == "b64" else "\n".join(body[at : at + 76] for at in range(0, len(body), 76))

        return re.sub(r"<(hex|n|name|uuid|b64|lines)(?::(\d+))?>", value, template)


AROUND: dict[str, tuple[str, ...]] = {
    "cloud_key/id": (
        "export AWS_ACCESS_KEY_ID=%",
        '  "AccessKeyId": "%",',
        "aws_access_key_id = %",
        "using % as credential",
    ),
    "cloud_key/secret": ("AWS_SECRET_ACCESS_KEY=%", "aws_secret_access_key = %", '"SecretAccessKey": "%"'),
    "cloud_key/azure": ("DefaultEndpointsProtocol=https;AccountName=logs;AccountKey=%;EndpointSuffix=core.example",),
    "private_key/file": ("$ cat id_rsa\n%", "%", "the key is:\n\n%\n"),
    "private_key/json": ('{"type": "service_account", "private_key": "%\\n", "client_id": "1"}',),
    "jwt/header": (
        "Authorization: Bearer %",
        '{"id_token": "%"}',
        "set-cookie: session=%; Path=/; HttpOnly",
        "decoded %",
    ),
    "token/known": (
        "token: %",
        'client = Client("%")',
        "-H 'Authorization: Bearer %'",
        "2026-11-30 INFO auth ok with %",
        '{"key": "%"}',
        "%",
    ),
    "token/bearer": ("> Authorization: Bearer %", '"Authorization": "Bearer %"'),
    "password/assigned": (
        'password = "%"',
        "DB_PASSWORD=%",
        "password: %",
        '"password": "%",',
        "export PGPASSWORD='%'",
        "  spring.datasource.password=%",
        'API_KEY = "%"',
        "secret_key: '%'",
        "client_secret=%&grant=x",
    ),
    "password/url": (
        "postgres://app:%@db.internal:5432/prod",
        "git clone https://ci:%@git.example/x.git",
        "redis://:%@cache:6379/0",
        'DATABASE_URL="mysql://root:%@127.0.0.1/shop"',
    ),
    "password/option": (
        "$ mysqladmin --password % status",
        "curl -u admin:% https://repo.example/",
        "$ vault login --token %",
    ),
    "password/prose": ("The password is %", "My password was % until Monday", "the secret is %"),
    "password/hex": ("api_key: %", 'auth_token = "%"', "SECRET=%"),
    "random/word": ("session %", '["%", 4]', "cookie value: %", "%"),
    "email/address": (
        "From: Ada <%>",
        "Author: A B <%>",
        "write to % today",
        "user=%",
        '{"mail":"%"}',
        "mailto:%",
    ),
    "phone/number": ("call % after nine", "Tel.: %", '"phone": "%"', "phone,%,active"),
    "iban/number": ("IBAN: %", "pay to % by Friday", '{"account": "%"}'),
    "card/number": ("card % exp 04/29", '"pan": "%"', "charged to %", "CARD=%"),
}
"""Lines around a secret (%), by kind and form."""
HONEST = (
    "commit <hex:40>\nparent <hex:40>\n    Fix the <name>",
    "request_id=<uuid> status=200 took=<n:900>ms",
    "data:image/png;base64,<b64:900>",
    '"integrity": "sha512-<b64:64>",\n"resolved": "https://registry.example/<name>/-/x-1.<n:9>.0.tgz"',
    "    --hash=sha256:<hex:64> \\\n    --hash=sha256:<hex:64>",
    "example.org/<name> v1.<n:9>.<n:9> h1:<b64:32>",
    "def login(user: str, password: str, token: str | None = None) -> Session:\n    secret = load_secret(user)\n"
    "    return connect(password=password, token=token or os.environ['TOKEN'])",
    "max_tokens=<n:9000>, token_ids=[<n:9000>, <n:9000>, <n:9000>], pad_token=None",
    'api_key: "${API_KEY}"\npassword: "{{ vault.password }}"\ntoken: <your token here>\nsecret: ********',
    "-----BEGIN CERTIFICATE-----\n<lines:700>\n-----END CERTIFICATE-----",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA<b64:30> build",
    "<n:1000000000> <n:1000000000> <n:1000000>.<n:1000000> -<n:10000>e-<n:30> 0x<hex:16>",
    "2026-1<n:3>-0<n:9>T1<n:10>:3<n:10>:4<n:10>.<n:999999>Z 1<n:999999999999999> <n:9999>",
    '  File "/opt/app/lib/python3.11/site-packages/<name>/core/AbstractFactoryBean2Proxy.py", line <n:900>, in '
    "resolvePasswordResetTokenHandler",
    "PASS tests/<name>.test.js (<n:99>.<n:999> s)\nTests: <n:99> passed, <n:99> total\nSnapshots: 0 total",
    '{"id": <n:999999999999>, "name": "<name>", "rows": [<n:100>, <n:100>, <n:100>], "etag": "<hex:32>"}',
    "docker pull registry.example/<name>@sha256:<hex:64>",
    "git clone git@git.example:<name>/<name>.git && cd <name> && npm ci --prefix=./web",
    "<name>==2.<n:40>.<n:9>\nnumpy==1.<n:30>.<n:9>  # 2.0.<n:9>.dev<n:99999999>",
    '<input type="password" name="password" autocomplete="current-password" placeholder="Password">',
    "drwxr-xr-x  <n:9> root root <n:99999> Nov 1<n:9> 08:3<n:9> <name>-<n:99>.tar.gz",
    "SELECT id, password_hash FROM users WHERE token_id = <n:9999> AND key = 'primary' ORDER BY created_at LIMIT 20;",
    "The secret is to read the log first. A token is a word here, and the key to it is patience in <n:12> steps.",
    "loss 0.<n:999> lr <n:9>e-05 grad_norm 1.<n:999> tokens <n:9999999> tokens/s <n:99999>",
    "127.0.0.1:<n:60000> 10.0.<n:255>.<n:255> [::1]:8080 version 1.2.<n:99>.<n:9>",
    "<lines:1500>",
    "blake2b: <hex:128>\nmd5  <hex:32>  <name>.iso\nchecksum: <b64:32>",
    "const passwordField = document.querySelector('#password'); const apiKey = process.env.API_KEY;\n"
    "this.token = props.token;",
    "Order 4<n:9999999>-<n:9999> of 1<n:9>.1<n:3>.2026: <n:99> x <n:9999>-<n:99>, total <n:99999>,<n:99>",
    "@app.route('/token')\n@pytest.mark.parametrize('key,value', [('a', <n:9>)])\nprint(f\"{user}@{host}\")",
    "error TS2345: Argument of type 'Record<string, TokenProvider>' is not assignable to 'AccessKeyCredentials'",
    "kubectl get secret <name>-tls -o yaml  # type: kubernetes.io/tls, data: tls.crt, tls.key",
    '<uuid> <uuid>\nETag: W/"<hex:32>"\nX-Trace: 00-<hex:32>-<hex:16>-01',
    "The bearer of this ticket is one of the basic members; its tokens were spent in <n:40> days.",
    "passed=<n:900> failed=0 bypass: enabled, compass: north, keyboard: us, monkey: <n:9>",
    "index <hex:10>..<hex:10> 100644\n--- a/<name>/Handler.java\n+++ b/<name>/Handler.java\n@@ -<n:99>,7 +<n:99>,9 @@",
)
"""Texts without secrets that look as if they had some."""
