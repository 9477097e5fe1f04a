"""Raw data to TFRecords, and back to tensors.

    manifest    what a dataset holds and how to tell that it is whole     standard library only
    schema      what a record holds                                      standard library only
      limits      rules and thresholds of drift that it may hold
      evolution   what a change of it means, and older data under a newer one
    options, format    the options of prepare, and fingerprints          standard library only
      splits      how rows are dealt to splits
    errors      what can be wrong                                        standard library only
    build       prepare(): from raw data to a published dataset          Arrow
      files, listing, partitions       where raw data lies, and whether it changed
      source, images, labels, tables, delimited, jsonl, arrays, tfrecords    ways to read it
      convert, validate, rules         types, and rows that don't fit them; the user's checks
      split                            which rows are for evaluation
      columns, encode                  columns to framed tf.train.Examples
      statistics, sketch               of each feature, in the same pass; they add up exactly
      drift, report, quality           what lies beside a manifest to judge a dataset by
      units, write                     resumable, atomic files
    frames      where a file of records is damaged                        crc32c
    layers      Keras preprocessing layers from statistics                Keras, once it is needed
    read        Dataset.open(): records to tensors                       TensorFlow, once it is needed
      shares, salvage                  who reads what, and what is left of a damaged shard

`python -m trainers.records --spec JSON` is the pod step. `python -m trainers.records.drift A B`
compares two datasets. Nothing here imports TensorFlow or Keras at module level.
"""
