"""What lies underneath: torch's private calls, streams, timing, the host, files, options."""
