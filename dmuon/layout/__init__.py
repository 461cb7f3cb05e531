"""Where elements lie and which ranks hold them. Pure: the rank is an argument."""
