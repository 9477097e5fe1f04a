from __future__ import annotations

import os
from pathlib import Path

import pytest

from serving.errors import ConfigInvalid
from serving.server.flags import Batching, Options, _parser, parse


def test_flags_are_tf_serving_s():
    options = parse(
        [
            "--port=0",
            "--rest_api_port=0",
            "--model_config_file=models.config",
            "--file_system_poll_wait_seconds=2",
            "--allow_version_labels_for_unavailable_models",
            "--max_num_load_retries=5",
            "--load_retry_interval_micros=1000000",
            "--grpc_channel_arguments=grpc.max_concurrent_streams=7,grpc.primary_user_agent=x",
            "--enable_serialization_as_tensor_content=false",
            "--ready-file=ready.json",
        ]
    )
    assert options == Options(
        grpc_threads=min(8, (os.cpu_count() or 1) + 1),
        rest_threads=min(8, (os.cpu_count() or 1) + 1),
        port=0,
        rest_api_port=0,
        model_config_file=Path("models.config"),
        poll_s=2.0,
        allow_unavailable_labels=True,
        max_load_retries=5,
        load_retry_s=1.0,
        grpc_options=(("grpc.max_concurrent_streams", 7), ("grpc.primary_user_agent", "x")),
        as_tensor_content=False,
        ready_file=Path("ready.json"),
    )


def test_batching_and_single_models(tmp_path):
    file = tmp_path / "batching"
    file.write_text("max_batch_size { value: 3 }")
    base = ["--model_base_path=/models/m", "--model_name=m"]
    assert parse([*base, "--enable_batching", f"--batching_parameters_file={file}"]).batching == Batching(3)
    assert parse([*base, "--enable_batching=true"]).batching is not None
    assert parse([*base, "--enable_batching=false"]).batching is None
    assert parse(base).model_name == "m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "either --model_config_file or --model_base_path"),
        (["--model_base_path=x", "--port=70000"], "must be a port"),
        (["--model_base_path=x", "--port=81", "--rest_api_port=81"], "rest_api_port must differ"),
        (["--model_base_path=x", "--enable_batching=perhaps"], "must be true or false"),
        (["--model_base_path=x", "--grpc_max_threads=0"], "grpc_threads must be 1 or more"),
        (["--model_base_path=x", "--file_system_poll_wait_seconds=0"], "over 0"),
        (["--model_base_path=x", "--grpc_channel_arguments=a"], "must be key=value"),
        (["--model_base_path=x", "--enable_batching", "--batching_parameters_file=/none"], "/none"),
        (["--model_base_path=x", "--model_conf=y"], "unrecognized"),
    ],
)
def test_wrong_flags_end_with_a_message(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_every_flag_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    flags = {text for action in _parser()._actions for text in action.option_strings if text.startswith("--")}
    missing = {flag for flag in flags - {"--help", "--ready_file"} if f"`{flag}`" not in page}
    assert not missing


def test_bad_limits_are_refused():
    with pytest.raises(ConfigInvalid, match="num_batch_threads must be 1 or more, got 0"):
        Batching(num_batch_threads=0)


@pytest.mark.parametrize(
    ("cores", "flags", "threads"),
    [(2, [], 3), (64, [], 8), (2, ["--enable_batching"], 8), (2, ["--grpc_max_threads=5"], 5)],
)
def test_as_many_calls_at_a_time_as_cores_can_work_on(monkeypatch, cores, flags, threads):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert parse(["--model_base_path=x", *flags]).grpc_threads == threads
    of_rest = [flag.replace("grpc_max_threads", "rest_api_num_threads") for flag in flags]
    assert parse(["--model_base_path=x", *of_rest]).rest_threads == threads
