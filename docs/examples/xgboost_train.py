"""Distributed XGBoost with its own tracker, which finds its workers by the DMLC_ variables."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import xgboost as xgb
from xgboost import collective
from xgboost.tracker import RabitTracker

from trainers.job import reporting

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["DMLC_NUM_WORKER"])
HOST, PORT = os.environ["DMLC_TRACKER_URI"], int(os.environ["DMLC_TRACKER_PORT"])
ARGS = json.loads(os.environ["TRAINYARD_ARGS"])
MODEL = Path(os.environ["TRAINYARD_CHECKPOINTS"], "model.json")


class Report(xgb.callback.TrainingCallback):
    """Saves a checkpoint every 10 rounds, and says how far it is."""

    def after_iteration(self, model: xgb.Booster, epoch: int, evals_log: dict) -> bool:
        """After each round."""
        rounds = model.num_boosted_rounds()
        saved = None
        if RANK == 0 and rounds % 10 == 0:
            temp = MODEL.with_name("part-model.json")
            model.save_model(temp)
            temp.replace(MODEL)
            saved = rounds
        reporting.progress(
            rounds, target=ARGS["steps"], loss=evals_log["train"]["rmse"][-1], saved_step=saved
        )
        return False


def main() -> None:
    """Train what rounds are left."""
    tracker = None
    if RANK == 0:
        # Ranks by the task ids, so that they are ours.
        tracker = RabitTracker(WORLD, host_ip=socket.gethostbyname(HOST), port=PORT, sortby="task")
        tracker.start()
    with collective.CommunicatorContext(
        dmlc_tracker_uri=socket.gethostbyname(HOST),
        dmlc_tracker_port=PORT,
        dmlc_task_id=os.environ["DMLC_TASK_ID"],
    ):
        rows = np.random.default_rng(RANK)  # your shard here: the rank'th of the world
        x = rows.normal(size=(10_000, 20))
        data = xgb.DMatrix(x, label=x[:, 0] * x[:, 1])
        before = xgb.Booster(model_file=MODEL) if MODEL.exists() else None
        done = before.num_boosted_rounds() if before else 0
        log: dict = {}
        model = xgb.train(
            {"max_depth": ARGS["max_depth"], "tree_method": "hist"},
            data,
            num_boost_round=ARGS["steps"] - done,
            xgb_model=before,
            evals=[(data, "train")],
            evals_result=log,
            callbacks=[Report()],
            verbose_eval=False,
        )
        if RANK == 0:
            model.save_model(MODEL)
            rmse = log.get("train", {}).get("rmse") or [float("nan")]
            reporting.result({"rmse": rmse[-1]}, step=model.num_boosted_rounds())
    if tracker is not None:
        tracker.wait_for()


if __name__ == "__main__":
    main()
