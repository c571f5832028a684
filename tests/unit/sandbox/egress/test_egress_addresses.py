"""Where connections may go."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from tests.each import each
from turnlog.sandbox_workers.egress.client import Head
from turnlog.sandbox_workers.egress.policy import Authority, EgressUnavailable, Reason, RequestRefused, absolute
from turnlog.sandbox_workers.egress.sources import Addresses, Upstream, public

PRIVATE = (
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.8.9.10", "169.254.169.254", "172.16.0.1", "192.0.0.8",
    "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1",
    "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fe80::1%lo", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "3fff::1",
    "5f00::1", "100::1", "2001::1", "2001:0:7f00:1::", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:169.254.169.254", "2002:7f00:1::", "2002:a9fe:a9fe::1", "64:ff9b::127.0.0.1", "64:ff9b::169.254.169.254",
    "64:ff9b:1::10.0.0.1", "::ffff:0:127.0.0.1", "", "localhost", "1.2.3",
)  # fmt: skip


@each("address", PRIVATE)
def test_an_address_that_is_not_everybodys_is_not_public(address: str) -> None:
    assert not public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert public(address)


class Rebinding:
    """A name whose address changes from one question to the next."""

    def __init__(self, *answers: tuple[str, ...]) -> None:
        self.answers = list(answers)

    async def __call__(self, host: str, port: int) -> tuple[str, ...]:
        return self.answers.pop(0)


async def test_one_private_address_among_public_ones_refuses_the_host() -> None:
    addresses = Addresses([], Rebinding(("8.8.8.8", "10.0.0.1")))
    with pytest.raises(RequestRefused) as caught:
        await addresses.resolve_allowed(Authority("h.test", 80))
    assert caught.value.reason is Reason.private_address


async def test_a_connection_goes_to_the_address_that_was_checked_and_the_name_is_not_asked_for_again(
    origin: Any,
) -> None:
    resolve = Rebinding(("127.0.0.2", "127.0.0.1"), ("192.0.2.1",))
    there = f"origin.test:{origin.port}"
    upstream = Upstream(Addresses([there], resolve), ssl.create_default_context(), connections=1)
    head, target = Head("GET", "", ()), absolute(f"http://{there}/x?")
    for _ in range(2):  # nobody listens at the first address; the second request finds the connection open
        async with upstream.send_request(head, target, b"") as response:
            assert await response.read() == b"GET /x 0"
    await upstream.close()
    assert resolve.answers == [("192.0.2.1",)]


def test_a_private_host_needs_its_port() -> None:
    with pytest.raises(EgressUnavailable, match="private_hosts must list host:port"):
        Addresses(["mirror.test"])
