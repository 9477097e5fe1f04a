"""What `trainers.evaluate` is made of.

scoring     one pass over batches: what a model said of each example
summary     metrics, intervals, confusion: from what it said to numbers
bootstrap   confidence intervals
champion    another version's SavedModel as a function of features
"""
