"""What tests share: ranks, models, topologies, the single-process oracle."""
