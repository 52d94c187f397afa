"""Finds algorithms by name, and imports only the algorithm that is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_hisparse.algorithms.base import Selector

ALGORITHMS = {
    "cluster_kv": "vllm_hisparse.algorithms.cluster_kv.ClusterKV",
    "dsa": "vllm_hisparse.algorithms.dsa.DSA",
    "msa": "vllm_hisparse.algorithms.msa.MSA",
    "oracle": "vllm_hisparse.algorithms.oracle.Oracle",
    "pq_cache": "vllm_hisparse.algorithms.pq_cache.PQCache",
    "quest": "vllm_hisparse.algorithms.quest.Quest",
    "streaming_llm": "vllm_hisparse.algorithms.streaming_llm.StreamingLLM",
}


def find_algorithm(name: str) -> type[Selector]:
    """Return the algorithm of a known name, or of a dotted path `package.module.Class` outside this package.

    Raises:
        LookupError: there is no such algorithm; the message has the known names.
    """
    from vllm_hisparse.algorithms.base import Selector

    module_name, _, class_name = ALGORITHMS.get(name, name).rpartition(".")
    known = f"one of {', '.join(ALGORITHMS)}, or the dotted path of a SparseAlgorithm"
    if module_name.startswith("."):  # relative to no package
        raise LookupError(known)
    try:
        algorithm = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        # NOTE: the module of a dotted path may not be on PYTHONPATH, or may fail itself.
        reason = " ".join(str(error).split())[:200]
        raise LookupError(f"{known} ({reason})" if module_name else known) from None
    if not (isinstance(algorithm, type) and issubclass(algorithm, Selector)):
        raise LookupError(known)
    return algorithm
