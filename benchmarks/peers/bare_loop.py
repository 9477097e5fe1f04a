"""The limit: a compiled loop of plain ops over pictures that are in memory. Prints a JSON line."""

from __future__ import annotations

import json
import os
import time

from peer_options import peer_parser


def main() -> None:
    parser = peer_parser(__doc__)
    options = parser.parse_args()
    import tensorflow as tf
    import training_models as models

    from trainers.records.read import Dataset

    tf.random.set_seed(1)
    rows = 20 * 1024
    (held,) = Dataset.open(options.manifest).dataset("train", rows).take(1)
    image, label = held["image"], held["label"]
    values = models.weights(options.model, tf)
    batches = rows // options.batch

    @tf.function(autograph=False)
    def run(k):
        def step(i, total):
            begin = (i % batches) * options.batch
            x, y = image[begin : begin + options.batch], label[begin : begin + options.batch]
            with tf.GradientTape() as tape:
                found = models.logits(options.model, values, x, tf)
                value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=found))
            for variable, gradient in zip(values, tape.gradient(value, values), strict=True):
                variable.assign_sub(models.LEARNING_RATE * gradient)
            return i + 1, total + value

        return tf.while_loop(lambda i, _: i < k, step, (tf.constant(0), tf.constant(0.0)))[1] / tf.cast(
            k, tf.float32
        )

    def timed(k: int) -> float:
        began = time.perf_counter()
        float(run(tf.constant(k)))
        return time.perf_counter() - began

    timed(3)
    k = max(3, int(options.seconds * 20 / timed(20)))
    rates, costs = [], []
    for _ in range(options.windows):
        cpu = sum(os.times()[:2])
        rates.append(k * options.batch / timed(k))
        costs.append(k * options.batch / (sum(os.times()[:2]) - cpu))
    print(json.dumps({"rates": rates, "cpu_rates": costs, "loss": float(run(tf.constant(10)))}))


if __name__ == "__main__":
    main()
