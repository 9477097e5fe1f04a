from __future__ import annotations

import threading

import pytest

from serving.errors import ConfigInvalid, ReleaseConflict, StoreBusy
from serving.tfserving.config import ConfigFile, ModelEntry, ensure_config, parse_config, read_config

BY_HAND = """
model_config_list {
  config {
    name: "flights"
    base_path: "/models/flights"
    model_platform: "tensorflow"
    model_version_policy { latest { num_versions: 2 } }
    logging_config { sampling_config { sampling_rate: 0.5 } }
  }
}
"""


@pytest.fixture
def file(tmp_path):
    return ConfigFile(tmp_path / "serving" / "models.config", lock_wait_s=0.2)


def _put(file, name, versions, labels=None):
    with file.change(name, ModelEntry(name, f"/models/{name}", versions, labels or {})) as change:
        return change


def test_a_model_comes_changes_and_goes_and_others_stay(file):
    ensure_config(file.path)
    file.path.write_text(BY_HAND)
    _put(file, "digits", (2, 1, 2), {"stable": 1, "canary": 2})
    assert file.entry("digits") == ModelEntry("digits", "/models/digits", (1, 2), {"canary": 2, "stable": 1})
    change = _put(file, "digits", (2,), {"stable": 2})
    assert len(change.config.model_config_list.config) == 2
    assert change.before.model_config_list.config[1].version_labels == {"stable": 1, "canary": 2}
    with file.change("digits", None):
        pass
    assert str(file.read()) == str(parse_config(BY_HAND)), "what somebody wrote by hand stays as it was"
    with file.change("digits", None):
        pass


def test_fields_of_ours_are_replaced_and_others_kept(file):
    file.path.parent.mkdir()
    file.path.write_text(BY_HAND)
    with pytest.raises(ReleaseConflict, match="version policy other than `specific`"):
        file.entry("flights")
    _put(file, "flights", (3,))
    model = file.read().model_config_list.config[0]
    assert list(model.model_version_policy.specific.versions) == [3]
    assert model.logging_config.sampling_config.sampling_rate == 0.5


@pytest.mark.parametrize("content", [None, BY_HAND])
def test_a_change_that_fails_leaves_the_file_as_it_was(file, content):
    ensure_config(file.path)
    file.path.unlink()
    if content:
        file.path.write_text(content)
    seen = []

    def refuse():
        with file.change("digits", ModelEntry("digits", "/m", (1,))) as change:
            seen.append((file.entry("digits"), len(change.config.model_config_list.config)))
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        refuse()
    assert seen == [(ModelEntry("digits", "/m", (1,)), 1 + bool(content))]
    assert (file.path.read_text() if file.path.exists() else None) == content


def test_changes_wait_for_each_other(file):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with file.change("a", ModelEntry("a", "/a", (1,))):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    with pytest.raises(StoreBusy, match="is held by process"):
        _put(file, "b", (1,))
    leave.set()
    thread.join()
    threads = [
        threading.Thread(target=_put, args=(ConfigFile(file.path), f"m{i}", (i + 1,))) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(m.name for m in file.read().model_config_list.config) == ["a", *(f"m{i}" for i in range(6))]


def test_missing_and_wrong_files(tmp_path, file):
    assert file.entry("digits") is None
    assert str(read_config(ensure_config(file.path))) == "model_config_list {\n}\n"
    file.path.write_text(BY_HAND)
    assert "flights" in ensure_config(file.path).read_text()
    with pytest.raises(ConfigInvalid, match="can't be read"):
        read_config(tmp_path / "none")
    (tmp_path / "bad").write_text("model_config_list { nonsense: 1 }")
    with pytest.raises(ConfigInvalid, match="must be a ModelServerConfig as text proto"):
        read_config(tmp_path / "bad")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"base_path": ""}, "base_path of digits must not be empty"),
        ({"versions": ()}, "must be one or more numbers"),
        ({"versions": (0,)}, "must be one or more numbers over 0"),
        ({"labels": {"stable": 2}}, "label stable of digits must point at one of versions"),
    ],
)
def test_bad_entries_are_refused(given, message):
    with pytest.raises(ConfigInvalid, match=message):
        ModelEntry(**{"name": "digits", "base_path": "/m", "versions": (1,), **given})
