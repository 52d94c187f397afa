"""Limits of the operations. Each stands here alone: setup.py hands them to the compiler as `HISPARSE_<NAME>`.

A library that was built with others is refused when it is loaded (`ops/kernels.py`).
"""

INTERFACE_VERSION = 3  # of the functions that the library exports; raised by whoever changes the meaning of one
MAX_AGE = 1022  # tokens; what `resolve` tells apart
MAX_TOP_K = 4096  # positions of a selection
MAX_QUERY_LEN = 8  # selections of a request
MAX_COLUMNS = 8192  # of several selections
MAX_HOT_ROWS = 1 << 19  # of a request, or of a KV head in units, the reserved ones included
MAX_LAYERS = 128  # of one launch of `write_back`
NUM_STREAMS = 4  # whose kernels run beside each other, the main one included
VECTOR_BYTES = 16  # a lane's load or store: row sizes and head sizes are multiples
