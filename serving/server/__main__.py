"""python -m serving.server: see `serving.server`, or --help."""

from __future__ import annotations

import logging
import os
import sys

from serving.stubs import seed_tensorflow

# This process wants the parts of TensorFlow that run models, never the whole package: so the stand-in stays,
# and imports inside TensorFlow that come late can't pull all of it in.
seed_tensorflow()

from serving.errors import ServingError  # noqa: E402
from serving.server.app import ModelServer  # noqa: E402
from serving.server.flags import parse  # noqa: E402
from serving.server.status import Refused  # noqa: E402


def main() -> int:
    options = parse()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for chatty in ("tensorflow", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        return ModelServer(options).run()
    except (ServingError, Refused) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A load that is still running would hold up the interpreter's end for as long as it takes.
    os._exit(code)
