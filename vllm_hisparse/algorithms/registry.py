"""Finds algorithms by name, and imports only the algorithm that is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from vllm_hisparse.algorithms.base import AlgorithmOptions, Selector

ALGORITHMS = {
    "cluster_kv": "vllm_hisparse.algorithms.cluster_kv.ClusterKV",
    "dsa": "vllm_hisparse.algorithms.dsa.DSA",
    "msa": "vllm_hisparse.algorithms.msa.MSA",
    "oracle": "vllm_hisparse.algorithms.oracle.Oracle",
    "pq_cache": "vllm_hisparse.algorithms.pq_cache.PQCache",
    "quest": "vllm_hisparse.algorithms.quest.Quest",
    "streaming_llm": "vllm_hisparse.algorithms.streaming_llm.StreamingLLM",
}


class AlgorithmRefused(LookupError):
    """There is no such algorithm, or it breaks a rule of `SparseAlgorithm`.

    Attributes:
        advice: a sentence that says how to correct it.
    """

    def __init__(self, expected: str, advice: str = "Correct the name."):
        super().__init__(expected)
        self.advice = advice


def find_algorithm(name: str) -> type[Selector]:
    """Return the algorithm of a known name, or of a dotted path `package.module.Class` outside this package.

    Raises:
        AlgorithmRefused: there is no such algorithm; the message says what is expected.
    """
    from vllm_hisparse.algorithms.base import AlgorithmOptions, Selector, SparseAlgorithm

    module_name, _, class_name = ALGORITHMS.get(name, name).rpartition(".")
    if not module_name or module_name.startswith("."):  # a dot at the start is relative to no package
        colon = ": a dot before the class, not a colon" if ":" in name else ""
        raise AlgorithmRefused(f"one of {', '.join(ALGORITHMS)}, or the dotted path of a SparseAlgorithm{colon}")
    found = getattr(_import(module_name), class_name, None)
    if found is None:
        raise AlgorithmRefused(f"a class of the module '{module_name}', which has no '{class_name}'")
    if not (isinstance(found, type) and issubclass(found, Selector)):
        kind = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise AlgorithmRefused(f"a subclass of SparseAlgorithm; it is {kind}", "Derive the class from SparseAlgorithm.")
    if name not in ALGORITHMS and not (issubclass(found, SparseAlgorithm) and found.model_family == "gqa"):
        raise AlgorithmRefused(
            "a SparseAlgorithm for dense models (model_family 'gqa')",
            "Derive the class from SparseAlgorithm, and leave model_family as it is.",
        )
    if not (isinstance(found.Options, type) and issubclass(found.Options, AlgorithmOptions)):
        raise AlgorithmRefused("a class whose Options is a subclass of AlgorithmOptions", "Correct the class.")
    return found


def _import(module_name: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise AlgorithmRefused(
                f"one of {', '.join(ALGORITHMS)}, or the dotted path of a SparseAlgorithm: {error}",
                "Correct the path, or set PYTHONPATH to the folder of the module.",
            ) from None
        raise _broken(module_name, error) from error
    except Exception as error:  # NOTE: a module may raise anything
        raise _broken(module_name, error) from error


def _broken(module_name: str, error: Exception) -> AlgorithmRefused:
    """Return the refusal of a module that fails."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return AlgorithmRefused(f"a module that can be imported; '{module_name}' fails with {reason}", "Mend the module.")


def check_class(algorithm: type[Selector], options: AlgorithmOptions) -> None:
    """Refuse a class that cannot make an algorithm, or declares impossible sizes.

    Args:
        algorithm: the class.
        options: its parsed options.

    Raises:
        AlgorithmRefused: the message says what is expected.
    """
    missing = sorted(getattr(algorithm, "__abstractmethods__", ()))
    if missing:
        raise AlgorithmRefused(f"a class with the method {', '.join(missing)}", "Write it.")
    for name in ("unit_tokens", "min_budget"):
        method = getattr(algorithm, name, None)
        if method is None:
            continue
        if not isinstance(getattr(method, "__self__", None), type):
            raise AlgorithmRefused(f"a class whose {name} is a classmethod", "Decorate it with @classmethod.")
        try:
            number = method(options)
        except Exception as error:  # NOTE: a method may raise anything
            raise AlgorithmRefused(
                f"a class whose {name} returns a number; it fails with {type(error).__name__}: {error}",
                "Correct the method.",
            ) from error
        if type(number) is not int or number < 1:
            raise AlgorithmRefused(
                f"a class whose {name} returns a whole number from 1 on; it returns {number!r}", "Correct the method."
            )
