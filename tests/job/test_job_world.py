"""What commands of other frameworks are told of their gang, and the files by which they speak."""

import json

import pytest

from trainers.job import reporting
from trainers.job.plan import Cluster, Plan, make_plan
from trainers.job.resources import Resources
from trainers.job.spec import RoleKind, Strategy, TrainingJob, standard_roles
from trainers.job.world import world_env, world_size

CUSTOM = Strategy("custom")


def custom_job(**roles):
    return TrainingJob("own", strategy=CUSTOM, output="/jobs/own", roles=standard_roles(CUSTOM, **roles))


def test_ranks_by_name_on_a_cluster():
    job = custom_job(
        workers=2, ps=1, command={"default": ["a"], "ps": ["b"]}, resources={"worker": Resources(gpu=4)}
    )
    plan = make_plan(job, Cluster.kubernetes("ml"), gang="own-1")
    told = {r.replica: r.env for r in plan.replicas}
    assert {name: env.get("RANK") for name, env in told.items()} == {
        "ps-0": None,
        "worker-0": "1",
        "worker-1": "2",
        "chief-0": "0",
    }
    assert world_size(job) == 3
    assert {env["MASTER_ADDR"] for env in told.values()} == {"chief-0.own-1.ml.svc"}
    assert {env["MASTER_PORT"] for env in told.values()} == {"2222"}
    assert told["worker-1"]["TRAINYARD_ADDRESS"] == "worker-1.own-1.ml.svc:2222"
    # torchrun starts as many processes as there are GPUs.
    assert (told["worker-1"]["PET_NPROC_PER_NODE"], told["chief-0"]["PET_NPROC_PER_NODE"]) == ("4", "1")
    assert {r.command for r in plan.replicas} == {("python", "-m", "trainers.runtime.launcher")}
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert [line.split()[-1] for line in plan.describe().splitlines()[2:]] == ["b", "a", "a", "a"]


def test_a_role_may_say_otherwise():
    job = custom_job(workers=1, command=["a"])
    chief, worker = job.roles
    job = TrainingJob(
        "own",
        strategy=CUSTOM,
        roles=(type(chief)("chief", command=["a"], env={"MASTER_PORT": "29500"}), worker),
    )
    plan = make_plan(job, Cluster.kubernetes("ml"), gang="own-1")
    assert plan.replica(RoleKind.CHIEF, 0).env["MASTER_PORT"] == "29500"


def test_an_ipv6_address_has_no_brackets_without_its_port():
    job = custom_job(command=["a"])
    env = world_env(job, RoleKind.CHIEF, 0, {RoleKind.CHIEF: ["[::1]:2222"]})
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("::1", "2222")


def test_other_strategies_are_told_by_tf_config_alone():
    job = TrainingJob("own", "trainer")
    assert world_env(job, RoleKind.CHIEF, 0, {RoleKind.CHIEF: ["a:1"]}) == {}


def test_a_long_command_is_cut_and_stays_on_its_line():
    job = custom_job(command=["python", "-c", "a\nb" * 100])
    line = make_plan(job, Cluster.kubernetes("ml"), gang="own-1").describe().splitlines()[-1]
    assert "python -c 'a\\nba" in line
    assert line.endswith("...")


def test_reports_are_read_back(tmp_path, monkeypatch):
    progress, result = tmp_path / "progress.json", tmp_path / "result.json"
    reporting.progress(1)  # by hand, without a launcher: nothing happens
    monkeypatch.setenv("TRAINYARD_PROGRESS", str(progress))
    monkeypatch.setenv("TRAINYARD_RESULT", str(result))
    reporting.progress(3, target=9, loss=0.5, examples_per_s=10.0, saved_step=2)
    assert reporting.read_progress(progress) == {
        "step": 3,
        "target": 9,
        "loss": 0.5,
        "examples_per_s": 10.0,
        "saved_step": 2,
    }
    reporting.progress()
    assert reporting.read_progress(progress) == {}
    reporting.result({"accuracy": 0.9}, step=9)
    assert reporting.read_result(result) == (9, {"accuracy": 0.9})


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"step": "3", "metrics": 4}', '{"step": 1.5, "metrics": {"a": "b", "c": NaN}}']
)
def test_what_is_no_report_is_none(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert reporting.read_progress(path) == {}
    assert reporting.read_result(path) == (None, {})
    assert reporting.read_result(tmp_path / "none") == (None, {})
