"""Jobs whose replicas are killed at random: `python -m tests.faults.chaos --minutes 20 --seed 1`."""
