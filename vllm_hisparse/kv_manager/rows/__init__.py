"""What a worker's process holds: host memory, hot buffers, the tables of its requests."""
