"""Sizes of the steps that decode in microbatches. They are in a module of their own, so that `plan` needs no vLLM."""

MIN_REQUESTS = 24  # smaller steps are not divided
# Least requests of a microbatch in a step of three or more microbatches: with pinned memory or drafts, and with managed
# memory. Rows arrive sooner from managed memory, so there is less to hide, and larger microbatches were faster (56
# requests with independent selections measured; with a trace, two runs disagree). With drafts, a request misses more
# rows in a step, and the smaller microbatches were faster (56 requests).
LEAST_REQUESTS, MANAGED_LEAST_REQUESTS = 12, 18
MAX_REQUESTS = 128  # larger steps are not divided, because their sequences are short and mostly hot
