"""Prefill and decode fleets on Ray Serve, built on `ray.serve.llm`."""
