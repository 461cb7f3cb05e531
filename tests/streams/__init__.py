"""The code on pretended streams: what an accelerator may do in another order than the program says."""
