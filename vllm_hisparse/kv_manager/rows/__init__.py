"""State of a worker's process: host memory, hot buffers, the tables of its requests."""
