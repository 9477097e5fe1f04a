"""A trainer module with data of its own making: digits, moved by a pixel at random."""

from trainers.models.digits import CLASSES, build_model, loss, metrics  # noqa: F401 - part of this module


def optimizer(hparams, learning_rate):
    """Momentum; `learning_rate` is a number, or the schedule that the job asks for."""
    import keras

    return keras.optimizers.SGD(learning_rate, momentum=hparams.get("momentum", 0.9))


def make_dataset(records, ctx):
    """Batches of (features, label); `ctx` says which share of the records is this replica's."""
    import tensorflow as tf

    data = records.dataset(
        "train",
        ctx.batch_size,  # of one replica; all that step together see ctx.global_batch
        shuffle=True,
        seed=ctx.shuffle_seed(),
        repeat=True,  # the job ends after ctx.steps, whatever the size of the data
        shard=ctx.shard,
        drop_remainder=True,
        cache=True,
    )

    def shift(batch):
        by = tf.random.uniform([2], -1, 2, tf.int32)
        return {"image": tf.roll(batch["image"], by, axis=[1, 2])}, batch["label"]

    return data.map(shift)
