"""A hook for the moment after vLLM has built a model and before it loads the weights."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.config import VllmConfig

RELEASES = ">=0.32"
VLLM = ("vllm.model_executor.model_loader.base_loader.BaseModelLoader.create_model",)
OTHER_LOADERS = ("ipc_cache", "modelexpress", "tensorizer")  # values of `--load-format` that build models by themselves


def when_built(check: Callable[[VllmConfig], None], visit: Callable[[torch.nn.Module, VllmConfig], None]) -> None:
    """Let vLLM call `check(vllm_config)` before it builds a model, and `visit(model, vllm_config)` afterwards.

    Draft models are left out. A second call in a process changes nothing.
    """
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    create = BaseModelLoader.create_model
    if hasattr(create, "visits_models"):
        return

    @wraps(create)
    def create_and_visit(self: Any, vllm_config: VllmConfig, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if model_config is not vllm_config.model_config or model_config.runner_type == "draft":
            return create(self, vllm_config, model_config, *args, **kwargs)
        check(vllm_config)
        model = create(self, vllm_config, model_config, *args, **kwargs)
        visit(model, vllm_config)
        return model

    create_and_visit.visits_models = True
    BaseModelLoader.create_model = create_and_visit
