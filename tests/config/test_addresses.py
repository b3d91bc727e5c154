"""Where a process listens and where others reach it are two things."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bough.client import Client
from bough.config.addresses import SocketAddress, advertised_host, bound, is_wildcard, joined
from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.errors import ConfigError
from bough.processes.launch import Settings, launched
from bough.processes.process import advertised
from bough.protocol.generation import GenerateOptions, TextPrompt, Tokens
from tests.fakes.simulated import simulated_settings, write_profile

REMOTE = "redis://:secret@192.0.2.77:6380/0"
LOCAL = "redis://127.0.0.1:6379"


def config(*flags: str) -> OrchestratorConfig:
    return parse(OrchestratorConfig, "orchestrator", [*flags], {})


def source(*addresses: str) -> Callable[[int, SocketAddress], str]:
    """A machine with these addresses, of which the first of a family is used."""

    def towards(family: int, _: SocketAddress) -> str:
        for address in addresses:
            if (":" in address) == (family == socket.AF_INET6):
                return address
        raise OSError("no route")

    return towards


def test_a_given_address_is_advertised() -> None:
    assert advertised(config("--host", "0.0.0.0", "--advertise", "node7"), 1) == "node7:1"
    assert advertised(config("--host", "10.0.0.7"), 2) == "10.0.0.7:2"
    assert advertised(config("--host", "::1"), 3) == "[::1]:3"
    assert advertised(config("--advertise", "[fd00::7]", "--advertise-port", "9"), 4) == "[fd00::7]:9"


@pytest.mark.parametrize(
    ("host", "own", "found"),
    [
        ("0.0.0.0", ("10.0.0.7",), "10.0.0.7"),
        ("::", ("10.0.0.7",), "10.0.0.7"),
        ("[::]", ("fd00::7", "10.0.0.7"), "10.0.0.7"),  # the index has an address of version 4 alone
    ],
)
def test_auto_finds_the_address_towards_the_index(host: str, own: tuple[str, ...], found: str) -> None:
    assert advertised_host(config("--host", host, "--index-url", REMOTE), source(*own)) == found


def test_an_ipv6_index_is_reached_from_an_ipv6_address() -> None:
    index = ("--index-url", "redis://[2001:db8::5]:6379")
    assert advertised_host(config("--host", "::", *index), source("10.0.0.7", "fd00::7")) == "fd00::7"
    with pytest.raises(ConfigError, match=r"2001:db8::5 this machine has no address"):
        advertised_host(config("--host", "0.0.0.0", *index), source("10.0.0.7", "fd00::7"))


@pytest.mark.parametrize(("own", "what"), [(("127.0.0.1",), "only 127.0.0.1"), ((), "no address")])
def test_an_address_that_only_this_machine_can_reach_is_refused(own: tuple[str, ...], what: str) -> None:
    message = rf"--advertise: must be .*, got auto, .* index at 192\.0\.2\.77 this machine has {what}"
    with pytest.raises(ConfigError, match=message) as caught:
        advertised_host(config("--host", "0.0.0.0", "--index-url", REMOTE), source(*own))
    assert "secret" not in str(caught.value)


def test_loopback_is_allowed_with_an_index_on_this_machine() -> None:
    assert advertised_host(config("--host", "0.0.0.0", "--index-url", LOCAL)) == "127.0.0.1"
    assert advertised_host(config("--host", "0.0.0.0", "--index-url", "unix:///tmp/index.sock")) == "127.0.0.1"


def test_a_wildcard_is_not_advertised() -> None:
    for wildcard in ("0.0.0.0", "::", "[::]"):
        with pytest.raises(ConfigError, match=r"--advertise: must be auto or an address .*, got "):
            advertised_host(config("--advertise", wildcard))


def test_loopback_with_an_index_elsewhere_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert advertised_host(config("--index-url", LOCAL)) == "127.0.0.1"
        assert not caplog.records
        assert advertised_host(config("--index-url", REMOTE)) == "127.0.0.1"
    (record,) = caplog.records
    assert "192.0.2.77" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_wildcards_and_brackets_are_understood() -> None:
    assert [host for host in ("", "0.0.0.0", "::", "[::]", "::1", "127.0.0.1", "node7") if is_wildcard(host)] == [
        "", "0.0.0.0", "::", "[::]",
    ]  # fmt: skip
    assert (joined("::1", 1), joined("[::1]", 1), joined("node7", 1)) == ("[::1]:1", "[::1]:1", "node7:1")


@pytest.mark.pipeline
@pytest.mark.parametrize("host", ["0.0.0.0", "::1", "::"])
async def test_processes_on_these_addresses_reach_each_other(tmp_path: Path, host: str) -> None:
    """Over real processes: each is in the index under an address that works, metrics too."""
    if ":" in host and not _has_version_6():
        pytest.skip("this machine has no IPv6")
    profile = write_profile(tmp_path)
    settings = simulated_settings(profile, profile)
    flags = ["--simulate", str(profile), "--host", host, "--insecure"]
    own = Settings(
        parse(TargetConfig, "t", flags, {}),
        parse(type(settings.draft), "d", flags, {}) if settings.draft is not None else None,
        parse(OrchestratorConfig, "o", ["--port", "0", "--host", host, "--insecure"], {}),
    )
    async with launched(own, lambda _: None) as cluster, Client(cluster.address) as client:
        reached_by = "[::1]" if host == "::1" else "127.0.0.1"
        info = await client.server_info()
        addresses = [cluster.address, *(worker.address for worker in info.workers)]
        assert [address.rpartition(":")[0] for address in addresses] == [reached_by] * 3
        assert info.metrics_url.startswith(f"http://{reached_by}:")
        options = GenerateOptions(max_tokens=5, temperature=0.0, ignore_eos=True)
        events = [event async for event in client.generate(TextPrompt("Once"), options)]
        assert sum(len(event.token_ids) for event in events if isinstance(event, Tokens)) == 5


def _has_version_6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_host_name_that_cannot_be_encoded_is_refused_like_an_unknown_one() -> None:
    with pytest.raises(OSError, match=r"'a\.\.b' is not a host name"):
        bound("a..b", 0)
