"""Raw data to TFRecords, and back to tensors.

    manifest    what a dataset holds and how to tell that it is whole     standard library only
    schema      what a record holds                                      standard library only
    options     the options of prepare, and fingerprints                 standard library only
    errors      what can be wrong                                        standard library only
    build       prepare(): from raw data to a published dataset          Arrow
      source, images, tables, jsonl    ways to read raw data
      convert, validate                types, and rows that don't fit them
      split                            which rows are for evaluation
      columns, encode                  columns to framed tf.train.Examples
      statistics                       of each feature, in the same pass
      units, write                     resumable, atomic files
    frames      where a file of records is damaged                        crc32c
    read        Dataset.open(): records to tensors                       TensorFlow, once it is needed

`python -m trainers.records --spec JSON` is the pod step. Nothing here imports TensorFlow but `read`, inside.
"""
