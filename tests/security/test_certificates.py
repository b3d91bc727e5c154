"""Files of certificates: what cannot be used is refused by the setting's name, and what has changed is read again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from bough.config.processes import OrchestratorConfig, TargetConfig
from bough.config.reader import parse, with_shared
from bough.errors import ConfigError
from bough.health.__main__ import main, status_of
from bough.rpc.server import is_serving, serving
from bough.security import tls
from bough.security.access import Access, certificate_files
from bough.security.certificates import CertificateFiles, read_certificates
from bough.security.private_files import WatchedFiles
from bough.security.tls import Tls
from tests.fakes.certificates import Authority, flags_of

AUTHORITY, STRANGER = Authority(), Authority("stranger")


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return AUTHORITY.files(tmp_path)


def refusal(files: CertificateFiles) -> str:
    with pytest.raises(ConfigError) as refused:
        read_certificates(files, is_server=True)
    assert "PRIVATE" not in str(refused.value)
    return str(refused.value)


def test_names_and_expiry_of_a_certificate_are_read(files: CertificateFiles) -> None:
    certificates = read_certificates(files, is_server=True)
    assert certificates.names == ("localhost", "127.0.0.1")
    assert b"BEGIN CERTIFICATE" in certificates.chain


def test_a_missing_file_is_named_by_its_setting(files: CertificateFiles) -> None:
    assert refusal(replace(files, cert="none")) == "--tls-cert: none must be a readable file, got: " + (
        "No such file or directory"
    )
    assert refusal(replace(files, key="none")).startswith("--tls-key: none must be a readable file")
    assert refusal(replace(files, authority="none")).startswith("--tls-ca: none must be a readable file")
    assert refusal(replace(files, client_authority="none")).startswith("--tls-client-ca: none must be a readable file")
    assert refusal(replace(files, key="")) == "--tls-key: missing; must be given if --tls-cert is"
    assert refusal(replace(files, cert="")) == "--tls-cert: missing; must be given if --tls-key is"


def test_a_key_that_others_can_read_is_refused(files: CertificateFiles) -> None:
    Path(files.key).chmod(0o644)
    assert refusal(files) == f"--tls-key: {files.key} must be closed to other users (chmod 600), got mode 644"


def test_an_invalid_certificate_is_refused(files: CertificateFiles, tmp_path: Path) -> None:
    (text := tmp_path / "text").write_text("hello")
    text.chmod(0o600)
    assert refusal(replace(files, cert=str(text))).startswith(f"--tls-cert: {text} must be a certificate in PEM")
    assert "its key without a passphrase" in refusal(replace(files, key=str(text)))
    authority = f"--tls-ca: {text} must be certificates of authorities in PEM"
    assert refusal(replace(files, authority=str(text))) == authority


def test_a_key_of_another_certificate_is_refused(files: CertificateFiles, tmp_path: Path) -> None:
    _, key = AUTHORITY.pair("other").write(tmp_path, "other")
    told = refusal(replace(files, key=str(key)))
    assert told == f"--tls-key: {key} must be the key of the certificate in {files.cert}"


def test_a_certificate_that_peers_would_refuse_is_refused_at_the_start(files: CertificateFiles, tmp_path: Path) -> None:
    AUTHORITY.pair("old", days=-1).write(tmp_path, "process")
    assert refusal(files).startswith(f"--tls-cert: {files.cert} must be valid now, as a server's, and by the authority")
    assert refusal(files).endswith("got: certificate has expired")
    assert refusal(replace(files, authority="")).endswith("and by itself, got: certificate has expired")
    STRANGER.pair("process").write(tmp_path, "process")
    assert refusal(files).endswith(
        f"by the authority in --tls-ca {files.authority}, got: unable to get local issuer certificate"
    )


def test_files_are_read_again_and_a_mistake_keeps_the_old_ones(
    files: CertificateFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(files, is_server=True)
    before = tls.now
    tls.refresh()
    assert tls.now is before
    Path(files.cert).write_text("a mistake")
    with caplog.at_level(logging.INFO):
        tls.refresh()
    assert tls.now is before
    assert "the previous contents remain in force" in caplog.text
    AUTHORITY.pair("process", days=3.0).write(tmp_path, "process")
    with caplog.at_level(logging.INFO):
        tls.refresh()
    assert tls.now is not before
    assert "the certificate of localhost, 127.0.0.1 is valid until" in caplog.text
    assert [record.levelname for record in caplog.records if "valid until" in record.message] == ["WARNING"]


def test_a_key_made_private_after_it_was_written_is_accepted(files: CertificateFiles, tmp_path: Path) -> None:
    """`openssl ... > key` and `chmod 600 key` are two steps, and the process may look between them."""
    tls = Tls(files, is_server=True)
    before = tls.now
    _, key = AUTHORITY.pair("process").write(tmp_path, "process")
    key.chmod(0o644)
    tls.refresh()
    assert tls.now is before
    key.chmod(0o600)
    tls.refresh()
    assert tls.now is not before


@pytest.mark.parametrize(
    ("kind", "flags", "told"),
    [
        (TargetConfig, ["--tls-cert", "c", "--tls-key", "k"], "--tls-ca: missing; must be given for a worker with"),
        (TargetConfig, ["--tls-peer-names", "a"], "--tls-ca: missing; must be given for a worker with"),
        (TargetConfig, ["--tls-ca", "a"], "--tls-cert: missing; must be given if --tls-ca is"),
        (OrchestratorConfig, ["--tls-ca", "a"], "--tls-cert: missing; must be given if --tls-ca is"),
        (OrchestratorConfig, ["--tls-client-ca", "a"], "--tls-cert: missing; must be given if --tls-client-ca is"),
    ],
)
def test_settings_that_depend_on_each_other_are_named(
    kind: type[TargetConfig | OrchestratorConfig], flags: list[str], told: str
) -> None:
    model = ["--model", "m"] if kind is TargetConfig else []
    with pytest.raises(ConfigError, match=told):
        certificate_files(parse(kind, "service", [*model, *flags], {}))


def test_one_variable_names_a_file_for_all_processes(files: CertificateFiles) -> None:
    everywhere = {"BOUGH_TLS_CERT": files.cert, "BOUGH_TLS_KEY": files.key, "BOUGH_TLS_CA": files.authority}
    everywhere |= {"BOUGH_TLS_PEER_NAMES": "a, b"}
    config = parse(OrchestratorConfig, "orchestrator", [], everywhere)
    assert certificate_files(config) == files
    assert config.tls_peer_names == ("a", "b")
    flagged = parse(OrchestratorConfig, "orchestrator", ["--tls-cert", "own"], {})
    assert certificate_files(with_shared(flagged, everywhere)) == replace(files, cert="own")
    assert Access.of(parse(TargetConfig, "t", ["--model", "m", *flags_of(files)], {})).tls is not None
    with pytest.raises(ConfigError, match="BOUGH_TLS_PEER_NAMES: must be names such as a,b, got 'a,,b'"):
        parse(OrchestratorConfig, "orchestrator", [], everywhere | {"BOUGH_TLS_PEER_NAMES": "a,,b"})


async def test_the_expiry_of_a_long_running_process_certificate_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process runs for months, and its log had only mentioned the expiry on the first day."""
    AUTHORITY.pair("process", days=15).write(tmp_path, "process")
    monkeypatch.setattr(tls, "REMIND_SECONDS", 0.01)
    own = Tls(CertificateFiles(str(tmp_path / "process.pem"), str(tmp_path / "process.key")), is_server=True)
    async with own.watched(), asyncio.timeout(20):
        await asyncio.sleep(0.1)
        assert "valid until" not in caplog.text
        later = time.time() + 2 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: later)
        while "the certificate of localhost, 127.0.0.1 is valid until" not in caplog.text:
            await asyncio.sleep(0.01)


async def test_a_watcher_continues_after_an_unexpected_error(tmp_path: Path) -> None:
    """It ended silently, and a key that was removed from the file afterwards remained valid."""
    (path := tmp_path / "file").write_text("first")

    def load() -> str:
        if (text := path.read_text()) == "second":
            raise ZeroDivisionError
        return text

    files = WatchedFiles("file", [str(path)], load)
    path.write_text("second")
    files.refresh()
    assert files.value == "first"
    path.write_text("the third")
    files.refresh()
    assert files.value == "the third"


async def test_a_process_is_found_by_its_new_certificate_without_an_authority(tmp_path: Path) -> None:
    """A supervisor knew the certificate of the start, and ended an orchestrator whose certificate was changed."""

    def renewed() -> CertificateFiles:
        return replace(Authority().files(tmp_path, hosts=["127.0.0.1"]), authority="")

    access = Access(tls=Tls(renewed(), is_server=True))
    async with serving("127.0.0.1", 0, "service", lambda _: None, credentials=access.api_credentials) as served:
        async with access.own_channel(f"127.0.0.1:{served.port}").opened() as first:
            assert await is_serving(first, "", 10.0)
        peer = access.own_channel(f"127.0.0.1:{served.port}")
        renewed()
        access.refresh()
        assert await is_serving(peer.current, "", 10.0)
        await peer.close()


async def test_connections_of_older_certificates_end_with_the_last(tmp_path: Path) -> None:
    """Their calls continued until an hour was over, although the process had closed all connections that it knew."""
    files = AUTHORITY.files(tmp_path)
    access = Access(tls=Tls(files, is_server=True))
    running, gone = asyncio.Event(), asyncio.Event()

    async def for_ever(_: bytes, __: object) -> bytes:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return b""

    def add(server: grpc.aio.Server) -> None:
        server.add_registered_method_handlers("s", {"wait": grpc.unary_unary_rpc_method_handler(for_ever, bytes)})

    async with serving("127.0.0.1", 0, "service", add, credentials=access.api_credentials) as served:
        peer = access.channel(f"localhost:{served.port}")
        before = peer.current
        call = before.unary_unary("/s/wait")(b"")
        async with asyncio.timeout(30):
            await running.wait()
            AUTHORITY.files(tmp_path)
            access.refresh()
            assert peer.current is not before
            await asyncio.sleep(0.05)
            assert not call.done(), "what runs goes on"
            await peer.close()
            assert call.done()
            await gone.wait()


async def test_a_process_that_requires_client_certificates_is_reached_with_its_own(tmp_path: Path) -> None:
    """With --tls-client-ca and no --tls-ca it refused its supervisor, for example health checks."""
    files = replace(AUTHORITY.files(tmp_path), authority="", client_authority=str(STRANGER.write(tmp_path, "clients")))
    with Path(files.cert).open("ab") as chain:
        chain.write(AUTHORITY.certificate)  # as those that come with their intermediate authorities
    access = Access(tls=Tls(files, is_server=True))
    async with serving("127.0.0.1", 0, "service", lambda _: None, credentials=access.api_credentials) as served:
        address = f"127.0.0.1:{served.port}"
        async with access.own_channel(address).opened() as channel:
            assert await is_serving(channel, "", 10.0)
        others = replace(AUTHORITY.files(tmp_path, "other"), authority=files.cert)
        assert (await status_of(address, "", others)).startswith("UNAVAILABLE"), "its own, and not its authority's"
        own = ["--tls-cert", files.cert, "--tls-key", files.key]
        assert await asyncio.to_thread(main, [address, *own]) == 0, "as a container's health check asks"
    assert access.api_context is not None
    assert access.own_context is not None

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1))
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0, ssl=access.api_context()) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=access.own_context())
        writer.write(b"a")
        assert await reader.read(1) == b"a"
        writer.close()


def test_of_two_concurrent_reads_of_a_file_the_later_one_counts(tmp_path: Path) -> None:
    """A slow reader put the contents of before back in force, until the next change."""
    (path := tmp_path / "file").write_text("first")
    reads, may_go_on = threading.Event(), threading.Event()

    def load() -> str:
        if (text := path.read_text()) == "second":
            reads.set()
            assert may_go_on.wait(10)
        return text

    files = WatchedFiles("file", [str(path)], load)
    path.write_text("second")
    slow, quick = (threading.Thread(target=files.refresh) for _ in range(2))
    slow.start()
    assert reads.wait(10)
    path.write_text("the third")
    quick.start()
    quick.join(0.05)
    may_go_on.set()
    slow.join()
    quick.join()
    assert files.value == "the third"
