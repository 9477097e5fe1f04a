"""The Makefile's verbs and the scripts behind them."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_imports, check_locks, check_docs = load("check_imports"), load("check_locks"), load("check_docs")


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=REPO,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_every_verb() -> None:
    text = (REPO / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    done = run("make", "-s", "help")
    assert done.returncode == 0
    listed = set(re.findall(r"^  make ([a-z-]+)", done.stdout, re.MULTILINE))
    assert listed == set(phony[1].split())


def test_scripts_can_be_run() -> None:
    for script in (*(p for p in SCRIPTS.iterdir() if not p.suffix), REPO / ".ci" / "run"):
        if script.is_file():
            assert os.access(script, os.X_OK), script
            assert script.read_text().startswith("#!/bin/sh\n"), script
            assert run("sh", "-n", script).returncode == 0, script


def test_the_walls_stand() -> None:
    assert check_imports.breaches() == []


def test_a_breach_is_told(tmp_path: Path) -> None:
    files = {
        "trainers/job/x.py": "import numpy\nfrom trainers.job.y import z\n",
        "trainers/deep/x.py": "def f():\n    from airflow.sdk import dag\n    from trainers.job import x\n",
        "serving/x.py": "import trainers.job\nimport airflowish\n",
        "plugins/trainyard/platform/x.py": "from . import y\nimport airflow\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    told = check_imports.breaches(tmp_path)
    assert [line.split(": ")[0] for line in told] == [
        "trainers/job/x.py:1",
        "trainers/deep/x.py:2",
        "serving/x.py:1",
        "plugins/trainyard/platform/x.py:2",
    ]


def test_the_locks_are_in_step() -> None:
    assert check_locks.faults() == []


def test_locks_out_of_step_are_told(tmp_path: Path) -> None:
    names = [name for lock, inputs in check_locks.LOCKS.items() for name in (lock, *inputs)]
    files = {
        **dict.fromkeys(names, ""),
        "requirements.in": "alpha==1.*\nbeta\n# a comment\n",
        "requirements-dev.in": "-c requirements.txt\ngamma>=2\n",
        "scripts/uv.in": "uv\n",
        "requirements.txt": "alpha==2.0 \\\n    --hash=sha256:a\n",
        "requirements-dev.txt": "alpha==2.1 ; python_version < '3.11' \\\n --hash=sha256:a\n"
        "gamma==1.0 \\\n --hash=sha256:b\n",
        "scripts/uv.txt": "uv==1.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    told = "\n".join(check_locks.faults(tmp_path))
    for text in (
        "requirements.txt: alpha is locked at 2.0, requirements.in wants alpha==1.*",
        "requirements.txt: beta of requirements.in is not locked",
        "requirements-dev.txt: gamma is locked at 1.0",
        "scripts/uv.txt: uv has no hash",
        "requirements-dev.txt: alpha differs from requirements.txt",
    ):
        assert text in told


def test_wrong_docs_are_told(tmp_path: Path) -> None:
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "x.py").write_text("a = 1\nb = 2\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: with `code`\n"
        "[good](dags/x.py) [anchor](#a-title-with-code) [web](https://example.org)\n"
        "[bad](nowhere.md) [bad anchor](#nothing)\n"
        "Run `make run` and `make fly`, `trainyard up` and `trainyard jump`.\n"
        "<!-- file: dags/x.py -->\n```python\na = 1\nb = 2\n```\n"
        "<!-- file: dags/x.py -->\n```python\na = 2\n```\n"
        "<!-- part: dags/x.py -->\n```python\nb = 2\n```\n"
        "<!-- part: dags/x.py -->\n```python\nb = 3\n```\n"
        "<!-- part: dags/gone.py -->\n```python\nb = 3\n```\n"
        "```python\nif\n```\n"
        "```python\n>>> 1 + 1\n2\n>>> 1 + 1\n3\n```\n"
        "```sh\n$ make dance\n[not](a-link)\n```\n"
    )
    told = list(check_docs.faults_of(page, tmp_path, {"run"}, {"up"}))
    for text in (
        "page.md:3: nowhere.md leads nowhere",
        "page.md:3: #nothing: no such heading",
        "`make fly` is not there",
        "`trainyard jump` is not there",
        "`make dance` is not there",
        "the block is not dags/x.py as it is",
        "the block does not stand in dags/x.py",
        "dags/gone.py is not there",
        "does not compile",
        "Expected:\n    3",
    ):
        assert any(text in line for line in told), (text, told)
    assert len(told) == 10


def test_the_docs_are_right() -> None:
    done = run(sys.executable, SCRIPTS / "check_docs.py")
    assert done.returncode == 0, done.stdout


def python_saying(folder: Path, name: str, *, version: str, modules: bool) -> None:
    """A python of a made-up version, for the installer to find."""
    script = folder / name
    answers = "0" if version else "1"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *version_info*13*) exit {answers} ;; *"%d.%d"*) echo {version} ;;\n'
        f"*ensurepip*) exit {0 if modules else 1} ;; *--version*) echo Python {version or '3.8.0'} ;; esac\n"
    )
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "texts"),
    [
        (
            "",
            [
                "needs Python 3.10, 3.11, 3.12 or 3.13",
                "python3 is Python 3.8.0",
                "PYTHON=/path/to/python3.12",
            ],
        ),
        ("3.12", ["can't make virtual environments", "apt install python3.12-venv"]),
    ],
)
def test_a_machine_without_a_fit_python_is_told(tmp_path: Path, version: str, texts: list[str]) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "dirname", "printf", "rm", "cat", "touch"):
        found = shutil.which(tool)
        assert found
        (tools / tool).symlink_to(found)
    for name in ("python3.13", "python3.12", "python3.11", "python3.10", "python3", "python"):
        python_saying(tools, name, version=version, modules=False)
    done = run("/bin/sh", SCRIPTS / "install", tmp_path / "venv", PATH=str(tools), PYTHON="")
    assert done.returncode == 1
    assert all(text in done.stderr for text in texts), done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_installation_that_is_whole_is_left_alone(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    # The stamp is what the script writes: taken from its own function.
    script = (SCRIPTS / "install").read_text()
    body = script[script.index("fingerprint()") : script.index("\n}\n", script.index("fingerprint()")) + 3]
    stamp = run("sh", "-c", f'requirements=requirements.txt\n{body}\nfingerprint "{venv}/bin/python"').stdout
    (venv / ".installed").write_text(stamp)
    os.utime(venv / ".installed", (0, 0))
    done = run(SCRIPTS / "install", venv)
    assert (done.returncode, done.stderr) == (0, "")
    assert (venv / ".installed").stat().st_mtime > 0, "touched, so that make is content"


def test_the_suites_exit_code_is_passed_on(tmp_path: Path) -> None:
    """scripts/test with a python that stands for one whose tests fail, or whose coverage is too low."""
    python = tmp_path / "python"
    for failing, code in (("*pytest*", 1), ("*report*", 2), ("nothing", 0)):
        python.write_text(f'#!/bin/sh\ncase "$*" in {failing}) exit {code or 0} ;; esac\n')
        python.chmod(0o755)
        assert run(SCRIPTS / "test", PYTHON=str(python)).returncode == code


def test_what_failed_or_died_is_tried_again_and_named(tmp_path: Path) -> None:
    """One room's tests fail once, another's process dies twice, one has no tests, all others are well."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
cd {tmp_path}
echo "$*" | grep -o 'tests/.*' >>calls
case "$*" in
*tests/job) [ -e failed ] || {{ touch failed; echo 'FAILED tests/job/test_it.py::test_it'; exit 1; }} ;;
*tests/contract) exit 5 ;;
*tests/steps) [ -e died2 ] || {{ [ -e died ] && touch died2; touch died; exit 139; }} ;;
esac
"""
    )
    python.chmod(0o755)
    done = run(SCRIPTS / "test", PYTHON=str(python))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 tests failed in tests/job; again, alone:\nFAILED tests/job/test_it.py::test_it" in done.stdout
    assert done.stdout.count("tests/steps ended with code 139; again, alone:") == 2
    calls = (tmp_path / "calls").read_text().split()
    rooms = {f"tests/{path.name}" for path in REPO.joinpath("tests").iterdir() if path.is_dir()}
    assert set(calls) == rooms - {"tests/__pycache__"}
    assert sorted(call for call in set(calls) if calls.count(call) > 1) == ["tests/job", "tests/steps"]
    assert calls.count("tests/steps") == 3


def test_without_a_kubeconfig_the_way_to_a_cluster_is_told() -> None:
    done = run("scripts/test-kubernetes", KUBECONFIG="")
    assert done.returncode == 2
    assert "KUBECONFIG names no cluster" in done.stderr
    assert "kind create cluster --config deploy/kubernetes/kind.yaml" in done.stderr
    assert (REPO / "deploy" / "kubernetes" / "kind.yaml").exists()


def cluster_scripts(folder: Path, *, free_gib: int = 100, **bodies: str) -> dict[str, str]:
    """Scripts of a cluster that only note that they were called, but for `bodies`; the variables that name them."""
    df = folder / "bin" / "df"
    df.parent.mkdir()
    df.write_text(f"#!/bin/sh\nprintf 'a heading\\nfs 0 0 %s\\n' {free_gib * 1024**2}\n")
    df.chmod(0o755)
    for name in ("kube-up", "kube-down", "kube-image", "kube-node"):
        script = folder / name
        body = bodies.get(name.replace("-", "_"), "true")
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>{folder}/calls\n{body}\n')
        script.chmod(0o755)
    path = f"{df.parent}{os.pathsep}{os.environ['PATH']}"
    return {
        "KUBE_LOCAL": str(folder),
        "KUBE_LOCAL_STATE": str(folder / "state"),
        "PATH": path,
        "PYTHON": "true",
    }


def calls(folder: Path) -> list[str]:
    """What was called, in order; several images as one."""
    lines = (folder / "calls").read_text().splitlines()
    return [name for name, _ in itertools.groupby(line.split(" ")[0] for line in lines)]


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="kube-up wants root")


@needs_root
def test_ci_says_why_there_is_no_cluster(tmp_path: Path) -> None:
    environ = cluster_scripts(tmp_path, kube_up="echo no control groups; exit 1")
    done = run("scripts/ci-kubernetes", **environ)
    assert done.returncode == 0
    assert "no control groups" in done.stdout
    assert "tests/kubernetes did not run: the cluster did not come up" in done.stdout
    assert calls(tmp_path) == ["kube-down", "kube-image", "kube-up", "kube-down"]


@needs_root
def test_ci_begins_nothing_that_the_disk_cannot_hold(tmp_path: Path) -> None:
    done = run("scripts/ci-kubernetes", **cluster_scripts(tmp_path, free_gib=3))
    assert done.returncode == 0
    assert "tests/kubernetes did not run: 3 GiB of disk are free" in done.stdout
    assert not (tmp_path / "calls").exists()


@needs_root
def test_ci_is_red_when_our_image_cannot_be_built(tmp_path: Path) -> None:
    environ = cluster_scripts(tmp_path, kube_image="echo no such package; exit 3")
    done = run("scripts/ci-kubernetes", **environ)
    assert done.returncode == 1
    assert "no such package" in done.stdout
    assert calls(tmp_path) == ["kube-down", "kube-image"], "no cluster was started for nothing"


@needs_root
@pytest.mark.parametrize(("python", "code"), [("true", 0), ("false", 1)])
def test_ci_s_code_is_the_tests_and_the_cluster_goes(tmp_path: Path, python: str, code: int) -> None:
    environ = cluster_scripts(tmp_path)
    kubectl = tmp_path / "state" / "bin" / "kubectl"
    kubectl.parent.mkdir(parents=True)
    kubectl.symlink_to("/bin/true")
    done = run("scripts/ci-kubernetes", **{**environ, "PYTHON": python})
    assert done.returncode == code, done.stdout + done.stderr
    assert calls(tmp_path) == ["kube-down", "kube-image", "kube-up", "kube-down"]


@needs_root
def test_ci_leaves_a_cluster_up_that_was(tmp_path: Path) -> None:
    environ = cluster_scripts(tmp_path)
    kubectl = tmp_path / "state" / "bin" / "kubectl"
    kubectl.parent.mkdir(parents=True)
    kubectl.symlink_to("/bin/true")
    (tmp_path / "state" / "admin.conf").write_text("a kubeconfig")
    done = run("scripts/ci-kubernetes", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a cluster is up already" in done.stdout
    assert calls(tmp_path) == ["kube-image"], "nothing was taken down"
    built = (tmp_path / "calls").read_text()
    assert "kube-image build -t trainyard-trainer:ci" in built
    assert "kube-image forget trainyard-trainer:ci" in built
