"""The command line of `trainyard models`."""

from __future__ import annotations

import argparse
from typing import Any

from trainyard.commands.lineage import add_lineage

__all__ = ["add_models"]

_WHICH = "NAME, NAME@alias (champion, previous, stable, canary, ...) or NAME/VERSION"


def _examples(*lines: str) -> dict[str, Any]:
    text = "examples:\n" + "\n".join(f"  trainyard models {line}" for line in lines)
    return {"epilog": text, "formatter_class": argparse.RawDescriptionHelpFormatter}


def add_models(models: Any) -> None:
    """Add the actions to the subparsers of `trainyard models`."""

    def add(
        name: str, help: str, function: str, *examples: str, as_json: bool = True
    ) -> argparse.ArgumentParser:
        command = models.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}.", **_examples(*examples)
        )
        command.set_defaults(function=function)
        if as_json:
            command.add_argument("--json", action="store_true", help="as JSON")
        return command

    add("list", "all models", "models:list_models", "list", "list --json | jq -r '.[].name'")

    describe = add(
        "describe",
        "a model's versions: state, labels, signatures, metrics, promotions",
        "models_describe:describe",
        "describe digits",
        "describe digits@champion",
        "describe digits/7 --json",
    )
    describe.add_argument("model", help=_WHICH)

    create = add(
        "create",
        "publish, deploy, verify and promote a SavedModel from anywhere",
        "models_create:create",
        "create digits --from export/ --why 'trained elsewhere'",
        "create reviews --from s3://bucket/reviews.tar.gz --examples data.json --no-promote",
    )
    create.add_argument("name", help="the model's name, new or known")
    create.add_argument(
        "--from", dest="source", required=True, metavar="PLACE", help="a folder, a URL, a .tar.gz or a .zip"
    )
    create.add_argument(
        "--examples", metavar="FILE", help="inputs to verify it by, as for predict; random ones else"
    )
    create.add_argument("--signature", default="", help="of the examples (serving_default)")
    create.add_argument(
        "--records", metavar="MANIFEST", help="the dataset that it was trained on, to be watched against"
    )
    create.add_argument("--why", default="", help="a reason, for the promotion log")
    create.add_argument(
        "--no-promote", action="store_true", help="leave the champion; the version is label canary"
    )
    create.add_argument(
        "--deadline", type=float, default=120.0, metavar="S", help="for servers to load it (120)"
    )
    create.add_argument("--max-bytes", type=int, default=8 << 30, metavar="N", help="of the files (8 GiB)")
    create.add_argument(
        "--max-seconds", type=float, default=180.0, metavar="S", help="for looking at it (180)"
    )
    create.add_argument(
        "--max-memory", type=int, default=8 << 30, metavar="N", help="for looking at it (8 GiB)"
    )

    predict = add(
        "predict",
        "ask a served model",
        "models_predict:predict",
        "predict digits -d data.json",
        'predict flights -d \'[{"distance": 500.0, "dep_delay": 3.0}]\' --label canary',
        "predict digits -d - --rest --json < data.json",
    )
    predict.add_argument("name", help="the model's name")
    predict.add_argument(
        "-d",
        "--data",
        required=True,
        metavar="DATA",
        help="a JSON file, - for standard input, or JSON itself",
    )
    which = predict.add_mutually_exclusive_group()
    which.add_argument("--label", default="", help="ask what this label points at (stable, else the newest)")
    which.add_argument("--version", type=int, help="ask this version")
    predict.add_argument("--signature", default="", help="(serving_default)")
    predict.add_argument("--rest", action="store_true", help="over REST instead of gRPC")
    predict.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds (30)")

    score = add(
        "score",
        "score a file or a dataset with a released version, without a server",
        "models_score:score",
        "score flights --from 'raw/*.parquet' --columns carrier flight",
        "score digits/7 --from storage/records/digits/FINGERPRINT/manifest.json --split eval --output scores/",
    )
    score.add_argument("model", help=_WHICH + "; the champion of a NAME")
    score.add_argument(
        "--from", dest="source", required=True, metavar="PLACE", help="Parquet, CSV, JSON Lines, or a dataset"
    )
    score.add_argument("--output", default="", metavar="FOLDER", help="(scores/NAME under the storage root)")
    score.add_argument(
        "--columns", nargs="*", default=[], metavar="NAME", help="passed through beside the answers"
    )
    score.add_argument("--split", default="all", help="of a dataset (all)")
    score.add_argument(
        "--threshold", type=float, default=0.01, metavar="SHARE", help="of rows that may be bad (0.01)"
    )

    promote = add(
        "promote",
        "make a version the champion",
        "models_change:promote",
        "promote digits 7 --why 'better on the new cameras'",
        "promote digits 7 --why 'known outage in the eval data' --override",
    )
    promote.add_argument("name", help="the model's name")
    promote.add_argument("version", type=int)
    promote.add_argument("--why", required=True, help="the reason, for the promotion log")
    promote.add_argument(
        "--override", action="store_true", help="against its gate's verdict; recorded with your name"
    )

    log = add("log", "the promotions of a model", "models:show_log", "log digits", "log digits --json")
    log.add_argument("name", help="the model's name")

    back = add(
        "rollback",
        "serve the champion before again",
        "models_change:roll_back",
        "rollback digits --why 'worse in the field'",
        "rollback digits --to 3",
    )
    back.add_argument("name", help="the model's name")
    back.add_argument("--to", type=int, metavar="VERSION", help="serve this version instead")
    back.add_argument("--why", default="rolled back by hand", help="a reason, for the promotion log")

    add_lineage(add)

    delete = add(
        "delete",
        "remove a version, or a whole model",
        "models_change:delete",
        "delete digits/3",
        "delete digits --yes --why 'nobody asks it any more'",
    )
    delete.add_argument("model", help="NAME/VERSION, or NAME for all of it")
    delete.add_argument(
        "--unload", action="store_true", help="of a version that no label holds: off the replicas first"
    )
    delete.add_argument("--yes", action="store_true", help="don't ask")
    delete.add_argument("--why", default="deleted by hand", help="a reason, for the promotion log")
