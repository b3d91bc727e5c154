"""The file of keys: what is created, what is refused, and that a mistake in it lets no one in and locks no one out."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from bough.cli.main import main
from bough.errors import ConfigError, Unauthenticated
from bough.security.keys import MAX_KEY_LENGTH, Keyring, hash_of, read_keys, require_key

KEY = "sk-bough-one"
LINE = {"name": "alice", "sha256": hash_of(KEY)}


def written(path: Path, *lines: object, mode: int = 0o600) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    path.chmod(mode)
    return path


def keys(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `bough keys` prints."""
    with pytest.raises(SystemExit) as ended:
        main(["keys", *arguments])
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    return output.out


def test_a_key_is_printed_once_and_only_its_hash_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys")
    key = keys(capsys, "add", "alice", "--file", file, "--requests", "3", "--tokens-per-minute", "500").strip()
    assert key not in Path(file).read_text()
    assert os.stat(file).st_mode & 0o777 == 0o600
    holder = Keyring(file).holder([f"Bearer {key}"])
    assert (holder.name, holder.requests, holder.tokens_per_minute) == ("alice", 3, 500)
    listed = keys(capsys, "list", "--file", file)
    assert key not in listed
    assert "alice" in listed
    assert "3 requests at once, 500 tokens a minute" in listed


def test_a_changed_file_keeps_its_owner_and_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Root added a key, and the file was root's alone: the orchestrator, another user, could not read it any more."""
    file = written(tmp_path / "keys", LINE, mode=0o640)
    owner = (12345, 23456) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    keys(capsys, "add", "bob", "--file", str(file))
    status = file.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (*owner, 0o640)
    assert len(read_keys("f", file.read_text())) == 2


def test_a_file_whose_owner_cannot_be_kept_is_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    file = written(tmp_path / "keys", LINE)
    before = file.read_text()
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(SystemExit, match="2"):
        main(["keys", "add", "bob", "--file", str(file)])
    assert "must be a writable file, got: only root can keep its owner (user " in capsys.readouterr().err
    assert (file.read_text(), os.listdir(tmp_path)) == (before, ["keys"])


def test_one_of_a_tenants_keys_can_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys")
    old, new, other = (keys(capsys, "add", name, "--file", file).strip() for name in ("alice", "alice", "bob"))
    keys(capsys, "remove", "alice", "--file", file, "--id", hash_of(old)[:12])
    keyring = Keyring(file)
    assert keyring.holder([f"Bearer {new}"]).name == "alice"
    with pytest.raises(Unauthenticated):
        keyring.holder([f"Bearer {old}"])
    keys(capsys, "remove", "alice", "--file", file)
    assert [key.name for key in read_keys("f", Path(file).read_text())] == ["bob"]
    assert Keyring(file).holder([f"Bearer {other}"]).name == "bob"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("add", "a b"), "NAME: must be 1 to 64 letters"),
        (("add", ""), "NAME: must be 1 to 64 letters"),
        (("add", "a::b"), "NAME: must be 1 to 64 letters"),
        (("add", "a", "--expires", "tomorrow"), "--expires: must be a time such as"),
        (("add", "a", "--expires", "2027-01-31T00:00:00"), "--expires: must be a time such as"),
        (
            ("add", "a", "--expires", "2020-01-31T00:00:00Z"),
            "--expires: must be in the future, got 2020-01-31T00:00:00Z",
        ),
        (("add", "a", "--exp", "2999-01-31T00:00:00Z"), "unrecognized arguments: --exp"),
        (("add", "a", "--sessions", "-1"), "--sessions: must be a number from 0"),
        (("add", "a", "--requests", "-1"), "--requests: must be a number from 0"),
        (("remove", "nobody"), "NAME: must be a tenant with a key in"),
        (("add", "a", "--id", "12ab"), "--id: must be given with remove only, as add makes a new id, got 12ab"),
        (("remove", "alice", "--id", "12ab"), f"/keys: {LINE['sha256'][:12]}, got 12ab"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    file = written(tmp_path / "keys", LINE)
    before = file.read_text()
    with pytest.raises(SystemExit) as ended:
        main(["keys", *arguments, "--file", str(file)])
    assert ended.value.code == 2
    assert what in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (KEY, "line 2: must be a JSON object"),
        ({"name": "bob", "sha256": KEY}, "line 2: sha256: must be 64 hexadecimal digits"),
        ({"name": "bob"}, "line 2: sha256: must be 64"),
        ({"name": 7, "sha256": hash_of("x")}, "line 2: name: must be 1 to 64"),
        ({"name": "bob", "sha256": hash_of("x"), KEY: 1}, "line 2: fields must be some of name"),
        ({"name": "bob", "sha256": hash_of("x"), "requests": True}, "line 2: requests: must be a number"),
        ({"name": "bob", "sha256": hash_of("x"), "expires": 5}, "line 2: expires: must be a time"),
        (LINE | {"expires": "9999-12-31T23:59:59-05:00"}, "line 2: expires: must be a time"),  # in UTC no year has it
        ({"name": "bob", "sha256": hash_of(KEY)}, "every key must be one tenant's, got one of alice and bob"),
    ],
)
def test_an_invalid_line_is_named_without_revealing_a_key(tmp_path: Path, line: object, what: str) -> None:
    with pytest.raises(ConfigError, match="--keys") as refused:
        Keyring(str(written(tmp_path / "keys", LINE, line)))
    assert what in str(refused.value)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("mode", [0o602, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"closed to other users \(chmod 600\)"):
        Keyring(str(written(tmp_path / "keys", LINE, mode=mode)))
    Keyring(str(written(tmp_path / "keys", LINE, mode=0o640)))  # as Kubernetes mounts it for a group


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [f"Bearer {KEY} more"],
        [f"Bearer {KEY[:-1]}"],
        [f"Bearer {hash_of(KEY)}"],
        [f"Basic {KEY}"],
        [KEY],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
        ["Bearer \xff\xfe"],
        [b"Bearer \xff"],
        ["Bearer " + "x" * 10_000],
    ],
)
def test_every_wrong_key_has_the_same_answer(tmp_path: Path, shown: list[str | bytes]) -> None:
    keyring = Keyring(str(written(tmp_path / "keys", LINE)))
    with pytest.raises(Unauthenticated) as refused:
        keyring.holder(shown)
    with pytest.raises(Unauthenticated) as other:
        keyring.holder(["Bearer wrong"])
    assert str(refused.value) == str(other.value)
    assert keyring.holder([f"bearer  {KEY} "]).name == "alice"


def test_a_key_expires_at_its_date(tmp_path: Path) -> None:
    now = [1_800_000_000.0]  # 2027-01-15T08:00:00Z
    line = LINE | {"expires": "2027-01-15T09:00:01+01:00"}
    keyring = Keyring(str(written(tmp_path / "keys", line)), clock=lambda: now[0])
    assert keyring.holder([f"Bearer {KEY}"]).name == "alice"
    now[0] += 1
    with pytest.raises(Unauthenticated):
        keyring.holder([f"Bearer {KEY}"])


def test_a_changed_file_is_read_again_and_a_mistake_in_it_changes_nothing(tmp_path: Path) -> None:
    keyring = Keyring(str(file := written(tmp_path / "keys", LINE)))
    for mistake in ("no JSON", json.dumps(LINE | {"sha256": "short"})):
        written(file, mistake)
        keyring.file.refresh()
        assert keyring.holder([f"Bearer {KEY}"]).name == "alice"
    file.unlink()
    keyring.file.refresh()
    assert keyring.holder([f"Bearer {KEY}"]).name == "alice"
    written(file, {"name": "bob", "sha256": hash_of("two")})
    keyring.file.refresh()
    assert keyring.holder(["Bearer two"]).name == "bob"
    with pytest.raises(Unauthenticated):
        keyring.holder([f"Bearer {KEY}"])


@pytest.mark.parametrize("key", ["a b", "é", "a\nb", "x" * (MAX_KEY_LENGTH + 1)])
def test_a_key_that_no_header_can_carry_is_refused_without_revealing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key: must be at most") as refused:
        require_key("api_key", key)
    assert key not in str(refused.value)
