"""Sizes of the steps that decode in microbatches. They are in a module of their own, so that `plan` needs no vLLM."""

MIN_MICROBATCH_REQUESTS = 12  # requests of a microbatch; smaller ones were slower with recorded selections
MAX_REQUESTS = 128  # larger steps are not divided, because their sequences are short and mostly hot
