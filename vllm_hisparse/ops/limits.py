"""Limits of the operations, defined only here: setup.py hands them to the compiler as `HISPARSE_<NAME>`.

A library that was built with other limits is refused when it is loaded (`ops/kernels.py`).
"""

INTERFACE_VERSION = 9  # of the library's functions; raise it when one is added, or the meaning of one changes
MAX_AGE = 1022  # tokens; `resolve` treats older rows as equally old
# NOTE: these two were chosen by trying a few numbers with the traces of benchmarks/traces.
USE_BONUS = 8  # tokens by which a use moves a row's expiry on
MAX_BONUS = 48  # most tokens by which an expiry is later than the use
MAX_TOP_K = 4096  # positions of a selection
MAX_QUERY_LEN = 8  # new tokens of a request, each with a selection
MAX_COLUMNS = 8192  # positions of all selections of a request
MAX_HOT_ROWS = 1 << 19  # hot rows of a request, or hot units of a KV head, reserved slots included
MAX_LAYERS = 128  # layers of one launch of `write_back`
NUM_STREAMS = 4  # streams whose kernels run side by side, the main one included
VECTOR_BYTES = 16  # bytes of a lane's load or store; sizes of rows and heads are multiples
