"""The supervisor's process with small services in place of Airflow and the rest: for tests of its clients.

Which ones is said by the file `fakes.json` in the home: name to Python code that runs before it is ready.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from trainyard.platform.host import main
from trainyard.platform.probes import file_written
from trainyard.platform.services import Service
from trainyard.platform.settings import Settings


def fake_services(settings: Settings, ports: Mapping[str, int], **_: Any) -> list[Service]:
    fakes = json.loads((settings.home / "fakes.json").read_text())
    services = []
    for name, code in fakes.items():
        ready = settings.home / f"{name}.ready"
        script = f"import pathlib, sys, time\n{code}\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(600)"
        command = (sys.executable, "-S", "-c", script)
        services.append(Service(name, f"the {name}", command, file_written(ready), grace=5.0))
    return services


if __name__ == "__main__":
    sys.exit(main(make_services=fake_services))
