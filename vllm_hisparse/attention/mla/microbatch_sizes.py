"""The steps that decode in microbatches; the planner knows them without vLLM."""

MIN_MICROBATCH_REQUESTS = 12  # requests of a microbatch; smaller ones were slower with recorded selections
MAX_REQUESTS = 128  # larger steps are not divided: their sequences are short and mostly hot, so it would only cost time
