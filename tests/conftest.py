"""Hypothesis profiles: the same examples on every run, or (`--hypothesis-profile=explore`) many new ones."""

from hypothesis import HealthCheck, settings

_SHARED = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("repeatable", max_examples=40, stateful_step_count=40, derandomize=True, **_SHARED)
settings.register_profile("explore", max_examples=2000, stateful_step_count=80, print_blob=True, **_SHARED)
settings.load_profile("repeatable")
