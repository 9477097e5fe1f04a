"""Releases: gate, publish, promotion log, rollback; plain files on the storage, standard library only.

<storage>/models/<name>/<version>/         what servers load; whole or absent
<storage>/releases/<name>/versions/<n>.json    one record a version number, never removed
<storage>/releases/<name>/promotion.jsonl  append-only: who made which version the champion, and why

exported    what the exporter wrote: manifest, golden examples
gate        evaluation + thresholds -> pass, fail or unknown
store       numbers, publishing, champion, rollback, pruning
promotions  the promotion log
canary      what a canary must show, and the verdict
counts      where its numbers come from
watch       a share of the traffic, looks, promoted or rolled back
intent      a change of champion under way, for whoever comes after a kill
pruning     removing versions that nobody holds
steps       one idempotent function a pipeline step; what a DAG calls
"""
