"""Adapters to vLLM: they give its private names public ones, and hide differences between its releases.

Where a class of the plugin must override a private method of a vLLM class, a mixin or a class decorator here overrides
it, and calls a method with a public name. Where releases differ, the import of a file chooses by the names that the
installed vLLM has. Every file defines:

* `RELEASES`: the releases of vLLM that need the file, or its older variant if it has two;
* `DELETE`, if `RELEASES` has an upper bound: the code to delete when the last of these releases is dropped;
* `VLLM`: the names of vLLM that the file uses; `tools/vllm_compat.py` looks them up.
"""
