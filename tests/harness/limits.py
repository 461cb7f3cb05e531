"""How long a test may wait for what it has started."""

# Of whole programs, about twenty times what they take alone: several processes of the suite share the cores, and ranks
# can be many. It ends a hang, and is no measure of speed.
PROGRAM_SECONDS = 300.0
# From when a program has been told to end, or one of its ranks was killed.
ENDING_SECONDS = 60.0
