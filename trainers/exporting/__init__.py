"""What `trainers.export` is made of.

saved_model  a trained model as a SavedModel with two signatures
golden       held-out examples, and what a SavedModel answers to them
warmup       requests that a server plays before it calls a version ready
package      an export folder: staged, digested, described, published in one rename (standard library)
"""
