"""Keras `fit` in one process, on the batches of our reader. Prints a JSON line."""

from __future__ import annotations

import json
import os
import time

from peer_options import peer_parser


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--per-call", type=int, required=True)
    options = parser.parse_args()
    import keras
    import training_models as models

    from trainers.records.read import Dataset

    keras.utils.set_random_seed(1)
    model = models.build_model({"model": options.model})
    model.compile(
        models.optimizer({}, models.LEARNING_RATE), models.loss({}), steps_per_execution=options.per_call
    )
    data = Dataset.open(options.manifest).dataset(
        "train", options.batch, shuffle=True, seed=1, repeat=True, drop_remainder=True, cache=True
    )
    data = data.map(lambda batch: (batch["image"], batch["label"]))

    def timed(steps: int) -> float:
        began = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0)
        return time.perf_counter() - began

    per_call = options.per_call
    timed(2 * per_call)
    few = max(per_call, 20)
    k = max(few, round(options.seconds * few / timed(few) / per_call) * per_call)
    rates, costs = [], []
    for _ in range(options.windows):
        cpu = sum(os.times()[:2])
        rates.append(k * options.batch / timed(k))
        costs.append(k * options.batch / (sum(os.times()[:2]) - cpu))
    last = model.fit(data, steps_per_epoch=few, epochs=1, verbose=0).history["loss"][-1]
    print(json.dumps({"rates": rates, "cpu_rates": costs, "loss": last}))


if __name__ == "__main__":
    main()
