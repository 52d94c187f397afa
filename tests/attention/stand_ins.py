"""Objects of vLLM's classes whose constructors need weights, a GPU or a running engine."""

from __future__ import annotations

from typing import Any


def bare(cls: type, **attributes: Any) -> Any:
    """Make an object without its constructor.

    Args:
        cls: class of the object.
        attributes: attributes that the code under test reads; submodules of a layer included.
    """
    built = object.__new__(cls)
    built.__dict__.update(attributes)
    return built
