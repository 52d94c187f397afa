"""Random lives of requests against vLLM's real scheduler and the product's scheduler half, on simulated ranks and NIXL.

Every row and every indexer key that a step may read is checked when the simulated device runs it. `test_lives.py` runs
some lives of every configuration, `python -m tests.campaign` many, and faults of real engines beside them.
"""
