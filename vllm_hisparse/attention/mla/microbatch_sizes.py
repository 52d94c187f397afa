"""Sizes of the steps that decode in microbatches. They are in a module of their own, so that `plan` needs no vLLM."""

MIN_REQUESTS = 24  # smaller steps are not divided
MICROBATCH_REQUESTS = 18  # least requests of a microbatch in a step that is divided into three or more
MAX_REQUESTS = 128  # larger steps are not divided, because their sequences are short and mostly hot
