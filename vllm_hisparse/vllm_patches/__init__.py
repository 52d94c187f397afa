"""Mends of defects of vLLM, one in a file, which describes the symptom and where vLLM goes wrong.

`RELEASES` has an end once a release of vLLM is known that has no such defect; `DELETE` is what goes with the file when
the last of `RELEASES` is dropped; `VLLM` is what the mend replaces or relies on. `tools/vllm_compat.py` shows which of
it another release has changed: look whether the mend is still needed, and still right.
"""
