"""Airflow's configuration for one machine: a file of mode 0600 that holds every choice with its reason.

A file and not environment variables: tasks under LocalExecutor inherit the scheduler's environment, and
`AIRFLOW_HOME=.trainyard/airflow .venv/bin/airflow ...` then just works in a shell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from trainyard.platform.keys import AIRFLOW_USER, Keys
from trainyard.platform.ports import HOST
from trainyard.platform.settings import Settings

__all__ = ["airflow_options", "write_airflow_config"]

Options = Mapping[str, Mapping[str, str]]


def airflow_options(settings: Settings, keys: Keys, port: int) -> Options:
    """Every option that differs from Airflow's default, by section. `port` is the api-server's."""
    url = f"http://{HOST}:{port}"
    return {
        "core": {
            "dags_folder": str(settings.dags),
            "plugins_folder": str(settings.repo / "plugins"),
            "load_examples": "False",
            "executor": "LocalExecutor",
            "parallelism": str(settings.parallelism),
            "max_active_tasks_per_dag": str(settings.parallelism),
            "execution_api_server_url": f"{url}/execution/",
            # The default asks DNS for the machine's full name, which a laptop may wait for.
            "hostname_callable": "socket.gethostname",
            "fernet_key": keys.fernet_key,
            "simple_auth_manager_users": f"{AIRFLOW_USER}:admin",
            "simple_auth_manager_passwords_file": str(keys.passwords_file),
            "dags_are_paused_at_creation": "True",
            # A busy machine needs longer than 30 s for the first parse; a task that finds no DAG yet asks
            # again after 2 s and not after 60.
            "dagbag_import_timeout": "120",
        },
        "api": {
            "host": HOST,
            "port": str(port),
            "base_url": url,
            "workers": "1",
            "secret_key": keys.api_secret_key,
            "instance_name": "Trainyard",
        },
        "api_auth": {"jwt_secret": keys.jwt_secret},
        "database": {
            # SQLite lets one process write at a time: wait for the lock and do not fail.
            "sql_alchemy_conn": f"sqlite:///{settings.airflow_database}?timeout=60",
        },
        "scheduler": {
            # What bounds a chain of short tasks: 1.13 s a task at the default of 1 s, 0.46 s at 0.1 s.
            "scheduler_idle_sleep_time": "0.1",
            "enable_health_check": "False",
            "scheduler_health_check_server_host": HOST,
            "catchup_by_default": "False",
        },
        "dag_processor": {
            "parsing_processes": "1",
            "refresh_interval": "10",
            "dag_file_processor_timeout": "120",
        },
        "workers": {"missing_dag_retry_delay": "2", "missing_dag_retries": "30"},
        "logging": {
            "base_log_folder": str(settings.airflow_home / "logs"),
            "dag_processor_child_process_log_directory": str(
                settings.airflow_home / "logs" / "dag_processor"
            ),
            "colored_console_log": "False",
        },
    }


def write_airflow_config(path: Path, options: Options) -> None:
    """Write airflow.cfg whole and readable by its owner only; an existing one is replaced."""
    lines = ["# Written by Trainyard at every start of the embedded platform: changes are lost.\n"]
    for section, values in options.items():
        lines.append(f"[{section}]\n")
        # configparser interpolates %.
        lines += [f"{key} = {value.replace('%', '%%')}\n" for key, value in values.items()]
        lines.append("\n")
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.unlink(missing_ok=True)
    with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)
