"""The secret of the nodes: where it may come from, and which keys are made of it."""

from __future__ import annotations

import hashlib
import hmac

import pytest
import zmq
from servekit.config import ConfigError, ServerArgs
from servekit.runtime.nodes.secret import make_keys, read_secret
from zmq.utils import z85

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVEKIT_CLUSTER_SECRET", raising=False)


def file(folder, text=SECRET, mode=0o600) -> ServerArgs:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return ServerArgs(cluster_secret_file=str(path))


def test_it_comes_from_a_file_or_the_environment_and_white_space_around_it_does_not_count(tmp_path, monkeypatch):
    assert read_secret(ServerArgs()) is None
    assert read_secret(file(tmp_path, f"{SECRET}\n")) == SECRET.encode()
    monkeypatch.setenv("SERVEKIT_CLUSTER_SECRET", SECRET)
    assert read_secret(ServerArgs()) == SECRET.encode()
    with pytest.raises(ConfigError, match="given twice"):
        read_secret(file(tmp_path))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match=f"has mode {mode:03o}: others must not read it") as refused:
        read_secret(file(tmp_path, mode=mode))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_a_file_as_orchestrators_mount_it_is_taken(tmp_path, mode):
    assert read_secret(file(tmp_path, mode=mode)) == SECRET.encode()


@pytest.mark.parametrize("text", ["", "\n", "short", " " * 40, SECRET[:-1]])
def test_a_secret_that_could_be_guessed_is_refused_and_not_shown(tmp_path, text, monkeypatch):
    for args in (file(tmp_path, text), ServerArgs()):
        if args.cluster_secret_file is None:
            monkeypatch.setenv("SERVEKIT_CLUSTER_SECRET", text)
        with pytest.raises(ConfigError, match="has less than 16 characters") as refused:
            read_secret(args)
        assert not text.strip() or text not in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_secret(ServerArgs(cluster_secret_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="can't be read"):
        read_secret(ServerArgs(cluster_secret_file=str(tmp_path)))


def test_keys_are_hkdf_of_the_secret_and_differ_by_purpose_and_run():
    keys = make_keys(b"secret", "purpose", b"run")
    # RFC 5869, with one block of output.
    extracted = hmac.digest(b"run", b"secret", hashlib.sha256)
    assert z85.decode(keys.secret) == hmac.digest(extracted, b"purpose\x01", hashlib.sha256)
    assert keys.public == zmq.curve_public(keys.secret.encode()).decode()
    assert make_keys(b"secret", "purpose", b"run") == keys
    others = [
        make_keys(b"secret2", "purpose", b"run"),
        make_keys(b"secret", "other", b"run"),
        make_keys(b"secret", "purpose"),
    ]
    assert len({each.secret for each in [keys, *others]}) == 4


def test_without_a_number_of_the_run_the_salt_is_as_the_standard_has_it():
    # RFC 5869, test case 3, cut to its first block.
    from servekit.runtime.nodes import secret

    expected = bytes.fromhex("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d")
    assert z85.decode(secret.make_keys(b"\x0b" * 22, "").secret) == expected
