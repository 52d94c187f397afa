"""Mends of defects of vLLM, one in each file. The file's docstring gives the symptom and the place of the defect.

`RELEASES` has an upper bound if a release of vLLM without the defect is known. `DELETE` is the code to delete with the
file when the last of `RELEASES` is dropped. `VLLM` has the names that the mend replaces or relies on;
`tools/vllm_compat.py` shows which of them another release has changed. Then check that the mend is still needed and
right.
"""
