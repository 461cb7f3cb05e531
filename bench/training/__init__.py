"""A byte-level GPT and its training: what `bench/train.py` runs, and what other benches time."""
