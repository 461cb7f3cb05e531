"""What the user's model is: names, blocks, routes, shapes. Knows no rank and no process group."""
