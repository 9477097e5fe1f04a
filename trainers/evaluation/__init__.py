"""What `trainers.evaluate` is made of.

scoring     one pass over batches: what a model said of each example
slices      the parts of the examples that are looked at by themselves, as people write them
slicing     which examples belong to which slice
metrics     the metrics, from what was said
summary     metrics, intervals, confusion, differences: from what was said to a document
bootstrap   confidence intervals
champion    another version's SavedModel as a function of features
report      the document as one page, with plots
plots       the plots: calibration, confusion, residuals
canvas      a drawing, as SVG and as PNG
"""
