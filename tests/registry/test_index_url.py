"""What is read from the index's address; a password is never shown, however wrong the address."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import ConfigError
from bough.registry.connection import read_address
from bough.registry.registry import Registry


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense", "nonsense"),
        ("http://host", "redis://, rediss://, unix://"),
        ("redis://host:port", "port"),
        ("redis://host/first", "database must be a number, got /first"),
        ("redis://host/1/2", "database must be a number, got /1/2"),
        ("redis://host?db=first", "db"),
        ("redis://host?decode_responses=yes", "decode_responses: unknown setting"),
        ("redis://host?max_connections=1", "max_connections: unknown setting"),
        ("rediss://host?ssl_nonsense=1", "ssl_nonsense"),
        ("redis://host?ssl_ca_certs=file", "ssl_ca_certs"),
        ("redis://host#1", "#"),
        ("redis+cluster://host/1", "a cluster has only database 0"),
        ("redis+cluster://host?db=1", "db"),
        ("unix+cluster:///tmp/socket", "a cluster has only database 0"),
    ],
)
def test_urls_are_checked_at_once(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"index_url: must be redis://.*, got ") as caught:
        Registry(url)
    assert problem in str(caught.value)


@pytest.mark.parametrize("tls", ["", "s"])
def test_the_scheme_selects_a_cluster(tls: str) -> None:
    assert read_address(f"redis{tls}+cluster://:x@host:1/0") == (f"redis{tls}://:x@host:1/0", True, "")
    assert read_address(f"redis{tls}://host:1/3") == (f"redis{tls}://host:1/3", False, "")


@pytest.mark.parametrize(
    "url",
    ["redis://:secret@host:1/0", "rediss://user:secret@host", "redis://host?password=secret&db=1", "redis://secret@h"],
)
def test_passwords_are_not_shown(url: str) -> None:
    """A name of a user is none."""
    assert ("secret" in Registry(url).safe_url) == (url == "redis://secret@h")


FORMS = [
    "redis://:{}@host:1/0",
    "rediss://user:{}@host",
    "redis+cluster://user:{}@host:7000",
    "redis://host?password={}",
    "redis://host?password={}&db=1",
    "redis://host?db=1&password={}",
    "redis://host?%70assword={}",
    "redis:/:{}@host",
    ":{}@host",
]


@given(st.sampled_from(FORMS), st.text("/?#@:&=[]%\u2100\u00e9 1", min_size=1, max_size=6))
@pytest.mark.parametrize("name", ["Secret", "12Secret"])
def test_an_unquoted_password_is_neither_shown_nor_misread(name: str, form: str, signs: str) -> None:
    """Such a sign ends the place of a password, and what stood around it was printed as host, port, path or setting."""
    parts = [name, *(f"{sign}{name}" for sign in signs)]
    url = form.format("".join(parts))
    try:
        shown = Registry(url).safe_url
    except ConfigError as exc:
        shown = "".join(traceback.format_exception(exc))
    assert "Secret" not in shown, url


@pytest.mark.parametrize("password", ["pa/ss", "pa#ss", "pa?ss", "1/2", "1#2", "1?2"])
def test_a_password_with_characters_that_must_be_quoted_is_refused_with_instructions(password: str) -> None:
    """Digits before the sign were taken for the port of this machine's own index, without a word."""
    with pytest.raises(ConfigError, match="%2F %3F %23") as caught:
        Registry(f"redis://:{password}@host")
    assert password not in str(caught.value)
    assert Registry("redis://:pa%2Fs%23%3F@host").safe_url == "redis://:***@host"
