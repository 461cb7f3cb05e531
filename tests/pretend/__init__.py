"""A device that only pretends: the CPU's memory under another name, with streams, events and a back end of its own."""
