"""What `trainers.monitor` is made of.

requests     logged requests as rows of the features that a model was trained on
predictions  a model's answers as features, and how they were distributed on held-out records
parts        what was counted of which files: each file once
"""
