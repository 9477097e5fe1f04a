"""From a release to an object store, and on to servers' volumes: S3 as moto's server speaks it, kills and all."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from serving.errors import ReleaseConflict, ServerUnavailable
from serving.release import steps
from serving.release.exported import Export
from serving.release.mirror import mirror_file, mirror_version, remove_versions
from serving.sync import Sync, main

from .killing import Killer


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto, monkeypatch, request):
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{random.randrange(10**12)}"
    boto3.client("s3").create_bucket(Bucket=name)
    yield f"s3://{name}/prod"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def publish(tmp_path, fake_export):
    """Publishes an export of some content to the storage, and from there to a store; its number."""

    def publish(content, uri, name="digits"):
        version = steps.publish_step(tmp_path / "storage", name, fake_export(content, f"{name}-{content}"))[
            "version"
        ]
        mirror_version(tmp_path / "storage", name, version, uri)
        return version

    return publish


def _config(uri, tmp_path, **models):
    text = "model_config_list {\n"
    for name, versions in models.items():
        listed = " ".join(f"versions: {version}" for version in versions)
        policy = f"model_version_policy {{ specific {{ {listed} }} }}"
        text += f'config {{ name: "{name}" base_path: "/models/{name}" {policy} }}\n'
    path = tmp_path / "models.config"
    path.write_text(text + "}\n")
    mirror_file(path, f"{uri}/models.config")
    return path.read_text()


def _whole(target):
    """Every version that servers can see; each must be whole."""
    found = []
    for path in sorted(target.glob("*/[0-9]*")):
        Export.load(path).verify()
        found.append(f"{path.parent.name}/{path.name}")
    return found


def test_versions_and_config_come_whole_and_go(tmp_path, bucket, publish):
    target, sync = tmp_path / "volume", Sync(bucket, tmp_path / "volume")
    assert sync.once().problems == []
    assert (target / "models.config").read_text() == "model_config_list {\n}\n", "a server can start"
    publish("one", bucket)
    publish("two", bucket)
    publish("other", bucket, name="flights")
    config = _config(bucket, tmp_path, digits=[1, 2], flights=[1])
    passed = sync.once()
    assert (passed.copied, passed.problems) == (["digits/1", "digits/2", "flights/1"], [])
    assert (target / "models.config").read_text() == config
    assert (target / "digits" / "2" / "variables" / "variables.index").read_text() == "two" * 3
    assert sync.once().copied == []
    assert json.loads((target / ".synced").read_text())["problems"] == []

    # Gone from the store, but named by the config: it stays until the config lets go.
    remove_versions("digits", [1], bucket)
    assert sync.once().removed == []
    _config(bucket, tmp_path, digits=[2], flights=[1])
    assert sync.once().removed == []
    assert sync.once().removed == ["digits/1"]
    assert _whole(target) == ["digits/2", "flights/1"]


def test_a_config_waits_for_its_versions_and_a_bad_one_is_not_taken(tmp_path, bucket, publish):
    target, sync = tmp_path / "volume", Sync(bucket, tmp_path / "volume")
    publish("one", bucket)
    first = _config(bucket, tmp_path, digits=[1])
    sync.once()
    _config(bucket, tmp_path, digits=[1, 2])
    assert sync.once().problems == ["models.config waits for digits/2"]
    assert (target / "models.config").read_text() == first
    (tmp_path / "bad").write_text("model_config_list { what")
    mirror_file(tmp_path / "bad", f"{bucket}/models.config")
    assert "must be a ModelServerConfig" in sync.once().problems[0]
    publish("two", bucket)
    second = _config(bucket, tmp_path, digits=[1, 2])
    assert sync.once().problems == []
    assert (target / "models.config").read_text() == second


def test_what_is_not_whole_in_the_store_is_never_shown(tmp_path, bucket, publish):
    s3, name = boto3.client("s3"), bucket.split("/")[2]
    target, sync = tmp_path / "volume", Sync(bucket, tmp_path / "volume")
    publish("one", bucket)
    key = "prod/models/digits/1/saved_model.pb"
    s3.put_object(Bucket=name, Key=key, Body=b"ONE")
    assert "not what its exporter wrote" in sync.once().problems[0]
    s3.delete_object(Bucket=name, Key=key)
    assert "version 1 of digits" in sync.once().problems[0]
    s3.put_object(Bucket=name, Key="prod/models/digits/7/saved_model.pb", Body=b"no manifest yet")
    s3.put_object(Bucket=name, Key="prod/models/..evil/1/export.json", Body=b"{}")
    manifest = json.loads(s3.get_object(Bucket=name, Key="prod/models/digits/1/export.json")["Body"].read())
    manifest["files"]["../../evil"] = {"bytes": 1, "sha256": "0" * 64}
    s3.put_object(Bucket=name, Key="prod/models/digits/8/export.json", Body=json.dumps(manifest).encode())
    problems = sync.once().problems
    assert any("must lie within the export folder" in problem for problem in problems)
    assert _whole(target) == []
    assert not list(tmp_path.rglob("evil*"))
    assert not list(target.glob("*/.*"))

    # Sent again, it comes. Another export under a number that is here is told, and not taken.
    s3.put_object(Bucket=name, Key=key, Body=b"one")
    assert sync.once().copied == ["digits/1"]
    export = (target / "digits" / "1" / "export.json").read_bytes()
    s3.put_object(Bucket=name, Key="prod/models/digits/1/export.json", Body=export + b" ")
    assert "another one in the store than here" in sync.once().problems[0]


def test_a_mirror_that_is_killed_goes_on_and_numbers_are_never_given_twice(
    tmp_path, bucket, publish, monkeypatch
):
    import s3fs

    storage = tmp_path / "storage"
    version = steps.publish_step(storage, "digits", _big(tmp_path))["version"]
    real, sent = s3fs.S3FileSystem._put_file, []

    async def put(self, local, remote, **options):
        sent.append(remote.rsplit("/", 1)[-1])
        if len(sent) == 2:
            raise OSError("connection reset")
        return await real(self, local, remote, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
    with pytest.raises(ServerUnavailable, match="connection reset"):
        mirror_version(storage, "digits", version, bucket)
    assert Sync(bucket, tmp_path / "volume").once().copied == []
    sent[:] = ["one"] * 5
    mirror_version(storage, "digits", version, bucket)
    assert sent[-2:] == ["saved_model.pb", "export.json"]
    before = len(sent)
    mirror_version(storage, "digits", version, bucket)
    assert len(sent) == before, "it is there already"
    assert Sync(bucket, tmp_path / "volume").once().copied == ["digits/1"]
    manifest = storage / "models" / "digits" / "1" / "export.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(ReleaseConflict, match="holds another export"):
        mirror_version(storage, "digits", version, bucket)


def test_a_store_that_is_away_is_tried_again(tmp_path, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    s3fs.S3FileSystem.clear_instance_cache()
    handlers = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    store = tmp_path / "store"
    store.write_text("a file, and no folder")
    given = [f"--target={tmp_path / 'volume'}", "--interval=0.01"]
    monkeypatch.setattr("serving.sync._versions", lambda *_: (_ for _ in ()).throw(OSError("away")))
    assert main([f"--source=file://{store}", *given, "--once", "--timeout=0.05"]) == 1
    stopping = threading.Timer(0.2, lambda: handlers[signal.SIGTERM](signal.SIGTERM, None))
    stopping.start()
    assert main([f"--source=file://{store}", *given]) == 0
    stopping.join()


def test_killed_before_every_operation_the_next_pass_brings_all(tmp_path, publish):
    """The store is a folder here, so that a hundred kills take seconds; S3 comes below."""
    uri = f"file://{tmp_path}/store"
    publish("one", uri)
    publish("two", uri)
    config = _config(uri, tmp_path, digits=[2])
    old = tmp_path / "before"
    Sync(uri, old).once()
    remove_versions("digits", [1], uri)
    publish("three", uri)
    publish("other", uri, name="flights")
    config = _config(uri, tmp_path, digits=[2, 3], flights=[1])
    killer = Killer()
    try:
        for at in itertools.count(1):
            target = tmp_path / f"volume-{at}"
            shutil.copytree(old, target)
            if killer.run("sync", at, source=uri, target=str(target)) != {"killed": True}:
                break
            assert set(_whole(target)) >= {"digits/2"}
            named = (target / "models.config").read_text()
            assert "flights" not in named or "flights/1" in _whole(target)
            assert "operations" in killer.run("sync", source=uri, target=str(target))
            assert _whole(target) == ["digits/2", "digits/3", "flights/1"]
            assert (target / "models.config").read_text() == config
            assert not [path for path in target.rglob(".*") if path.name not in (".synced", ".sync.lock")]
            shutil.rmtree(target)
    finally:
        killer.close()
    assert at > 25


def _big(tmp_path):
    """An export of a few files of some megabytes, so that a kill finds a copy under way."""
    from .conftest import write_manifest

    folder = tmp_path / "big"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"graph")
    for number in range(4):
        (folder / "variables" / f"part-{number}").write_bytes(os.urandom(2 << 20))
    (folder / "golden.json").write_text("{}")
    write_manifest(folder)
    return folder


@pytest.mark.slow
def test_the_sidecar_killed_at_random_over_s3_shows_only_whole_versions(tmp_path, bucket):
    storage, target = tmp_path / "storage", tmp_path / "volume"
    version = steps.publish_step(storage, "digits", _big(tmp_path))["version"]
    mirror_version(storage, "digits", version, bucket)
    config = _config(bucket, tmp_path, digits=[version])
    command = [sys.executable, "-m", "serving.sync", f"--source={bucket}", f"--target={target}"]
    dice, seen = random.Random(7), set()
    for _ in range(6):
        process = subprocess.Popen([*command, "--interval=0.1"], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(target.glob("digits/*")) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(dice.random() * 0.08)
        process.kill()
        process.wait()
        assert _whole(target) in ([], ["digits/1"])
        seen.add(tuple(path.name[:6] for path in target.glob("digits/.*")))
        shutil.rmtree(target / "digits" / "1", ignore_errors=True)
    assert any(seen), "no kill found a copy under way"
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert _whole(target) == ["digits/1"]
    assert (target / "models.config").read_text() == config
    assert not list(target.glob("digits/.*"))
