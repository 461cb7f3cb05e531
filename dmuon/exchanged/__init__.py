"""The exchanged residency: matrices lie where FSDP2, tensor parallelism, HSDP or DDP put them."""
