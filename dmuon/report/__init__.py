"""What people are told: who owns what, and what is sent and held."""
