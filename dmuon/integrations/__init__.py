"""What frameworks need that neither they nor the optimizer bring; each module imports its framework."""
