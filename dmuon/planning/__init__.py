"""Who owns what: measured costs, the solver, and a plan that all ranks agree on."""
