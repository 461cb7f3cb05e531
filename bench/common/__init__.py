"""What several benches share: ranks, turns, options, results, and the programs that are timed."""
