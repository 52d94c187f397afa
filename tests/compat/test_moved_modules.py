"""Modules that vLLM has moved, under their old names."""

import importlib.util
import sys
from importlib import import_module

import pytest
from vllm.sampling_params import SamplingParams

from vllm_hisparse.compat.moved_modules import MovedModules


def test_a_moved_module_is_found_under_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports by an old name work, like Ray's; a name that exists is found without the finder."""
    old, new = "vllm.entrypoints.launchers.gone", "vllm.sampling_params"
    monkeypatch.setattr(MovedModules, "NAMES", {old: new, "vllm.sampling_params": "vllm.gone"})
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, MovedModules)])
    with pytest.raises(ModuleNotFoundError):
        import_module(old)
    MovedModules.install()
    MovedModules.install()
    assert sum(isinstance(finder, MovedModules) for finder in sys.meta_path) == 1
    assert import_module(old).SamplingParams is SamplingParams
    del sys.modules[old]
    monkeypatch.delitem(sys.modules, new)
    assert import_module(new).__file__.endswith("sampling_params.py")


@pytest.mark.parametrize("name", MovedModules.NAMES)
def test_one_of_the_two_names_is_vllms(name: str) -> None:
    found = [importlib.util.find_spec(each) for each in (name, MovedModules.NAMES[name])]
    assert any(spec is not None and spec.origin is not None for spec in found)
