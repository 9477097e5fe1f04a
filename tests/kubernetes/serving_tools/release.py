"""One step of a release from a pod, as a task of Airflow does it: python release.py STEP JSON-ARGUMENTS."""

from __future__ import annotations

import json
import os
import sys

from serving.release import steps

STORAGE = os.environ["TRAINYARD_STORAGE"]
SERVERS = [os.environ["TRAINYARD_MODEL_SERVER"]]
CONFIG = os.environ["TRAINYARD_MODEL_CONFIG"]
WHO = {"by": "test", "why": "a test"}

if __name__ == "__main__":
    step, given = sys.argv[1], json.loads(sys.argv[2])
    if step == "publish":
        found = steps.publish_step(STORAGE, "digits", given["export"])
    elif step == "deploy":
        found = steps.deploy_step(STORAGE, "digits", given["version"], SERVERS, CONFIG)
    elif step == "verify":
        found = steps.verify_step(STORAGE, "digits", given["version"], SERVERS, CONFIG)
    elif step == "promote":
        found = steps.promote_step(STORAGE, "digits", given["version"], SERVERS, CONFIG, **WHO)
    elif step == "rollback":
        found = steps.rollback(STORAGE, "digits", SERVERS, CONFIG, **WHO)
    else:
        raise SystemExit(f"no step {step}")
    print(json.dumps(found))
