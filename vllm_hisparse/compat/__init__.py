"""Adapters: private names of vLLM under public ones, and what vLLM names or places otherwise from release to release.

A class of vLLM that calls a private method of its own to be overridden is given that method here, by a mixin or a class
decorator that calls a method with a public name. A difference between releases is decided here, at import, by what vLLM
has. Every file says:

* `RELEASES`: the releases of vLLM that it is for, or its older variant where it has two;
* `DELETE`: what goes when the last of them is dropped, unless that is the file;
* `VLLM`: what it uses of vLLM, which `tools/vllm_compat.py` looks up.
"""
