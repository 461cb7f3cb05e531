"""Programs that tests run, or people: random ones, faults."""
