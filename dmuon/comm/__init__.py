"""Process groups and what travels over them. Knows no parameter."""
