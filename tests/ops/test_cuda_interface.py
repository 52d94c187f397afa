"""Constants, structs and signatures stand in csrc/cuda and in cuda_ops.py: both say the same."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from vllm_hisparse.layout import MAX_HOT_ROWS
from vllm_hisparse.ops import cuda_ops
from vllm_hisparse.ops.base import MAX_AGE, UnitTables
from vllm_hisparse.ops.kv_heads import KVHeads

SOURCE = "\n".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "csrc" / "cuda").glob("*.cu*")))
CODE = re.sub(r"//[^\n]*", "", SOURCE).replace("hisparse::", "")
CONSTANTS = {
    "kMaxTopK": "MAX_TOP_K",
    "kMaxQueryLen": "MAX_QUERY_LEN",
    "kMaxColumns": "MAX_COLUMNS",
    "kMaxLayers": "MAX_LAYERS",
    "kVectorBytes": "VECTOR_BYTES",
    "kInterfaceVersion": "INTERFACE_VERSION",
}
SCALARS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "bool": ctypes.c_bool}
STRUCTS = {
    value.__name__.lstrip("_"): value
    for value in vars(cuda_ops).values()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
}


def c_constant(name: str) -> int:
    (value,) = re.findall(rf"constexpr int {name} = (\d+);", CODE)
    return int(value)


def c_fields(struct: str) -> list[tuple[str, type]]:
    """Names and types of a C struct's fields as ctypes."""
    (body,) = re.findall(rf"struct {struct} \{{(.*?)\n\}};", CODE, re.DOTALL)
    fields = []
    for declaration in filter(None, (line.strip() for line in body.split(";"))):
        kind, name, length = re.fullmatch(r"(?:const )?(\w+\*?) (\w+)(?:\[(\w+)\])?", declaration).groups()
        field = ctypes.c_void_p if kind.endswith("*") else SCALARS[kind]
        fields.append((name, field * c_constant(length) if length else field))
    return fields


def c_arguments(launcher: str) -> list[type]:
    """Types of a launcher's arguments as ctypes."""
    declarations = set(re.findall(rf"cudaError_t hisparse_{launcher}\(([^)]*)\)", CODE.replace("\n", " ")))
    lists = {tuple(" ".join(part.split()[:-1]) for part in text.split(",")) for text in declarations}
    (arguments,) = lists  # a header, where there is one, says what the source says
    return [argument_type(argument) for argument in arguments]


def argument_type(declaration: str) -> type:
    kind = declaration.removeprefix("const ")
    if kind.rstrip("*") in STRUCTS:
        return ctypes.POINTER(STRUCTS[kind.rstrip("*")])
    return ctypes.c_void_p if kind.endswith("*") or kind == "cudaStream_t" else SCALARS[kind]


@pytest.mark.parametrize(("name", "python_name"), CONSTANTS.items())
def test_constants(name: str, python_name: str) -> None:
    assert getattr(cuda_ops, python_name) == c_constant(name)


def test_constants_of_every_device() -> None:
    assert (c_constant("kMaxAge"), c_constant("kMaxHotRows")) == (MAX_AGE, MAX_HOT_ROWS)


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs(struct: str) -> None:
    assert STRUCTS[struct]._fields_ == c_fields(struct)


def test_structs_are_found() -> None:
    assert len(STRUCTS) == 9


@pytest.mark.parametrize("launcher", cuda_ops._ARGUMENTS)
def test_signatures(launcher: str) -> None:
    assert [*cuda_ops._ARGUMENTS[launcher], ctypes.c_void_p] == c_arguments(launcher)


def test_every_launcher_has_a_signature() -> None:
    assert set(re.findall(r"cudaError_t hisparse_(\w+)\(", CODE)) == set(cuda_ops._ARGUMENTS)


def test_begin_units_gets_tables_by_request() -> None:
    """Without blocks, which it does not read; one state more than there are, which is of no request."""
    heads = KVHeads(num_heads=2, head_stride=6, tokens_per_unit=16)
    units = UnitTables.allocate(4, 3, heads, torch.device("cpu"))
    handles = torch.zeros(4, 9, dtype=torch.int32)[:, 0]
    seq_lens, state_indices = torch.zeros(4, dtype=torch.int32), torch.zeros(60, dtype=torch.int32)
    tables = cuda_ops._request_tables(handles, seq_lens, None, state_indices, units)
    pointers = state_indices.data_ptr(), handles.data_ptr(), seq_lens.data_ptr(), None
    assert (tables.state_indices, tables.handles, tables.seq_lens, tables.host_tables) == pointers
    assert (tables.handle_stride, tables.batch) == (9, 4)
    assert (tables.num_device_blocks, tables.num_states) == (60, 3 * 2 + 1)
