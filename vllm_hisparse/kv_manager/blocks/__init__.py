"""Decisions about block ids in the scheduler's process: host blocks, hot blocks, requests."""
