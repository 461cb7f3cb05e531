"""What stands beside training: the check, predictions and console scripts, none of which ``import dmuon`` loads."""
