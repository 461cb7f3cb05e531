"""Programs that tests run, or people: fuzz, faults."""
