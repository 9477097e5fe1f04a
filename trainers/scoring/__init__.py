"""What `trainers.score` is made of.

plan     what is scored by what, cut into parts that are scored on their own
rows     rows of a part: of a dataset of records, or of tables
answers  a released SavedModel's answers to rows, and rows that it refuses
"""
