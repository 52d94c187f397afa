"""What the scheduler's process knows: host blocks, hot blocks, requests."""
