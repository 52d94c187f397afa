"""Engines and a router as processes of this machine, for the demo, the tests and the benchmarks."""
