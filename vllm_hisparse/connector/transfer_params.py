"""`kv_transfer_params` of a request, checked: where a prefill instance keeps the KV of its prompt."""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

MAX_BLOCK_ID = 2**24  # NOTE: vLLM's worker computes with ids of kernel blocks, several per block, in int32.
MAX_TOKENS = 2**31 - 1

# NOTE: an id must not contain a comma, because vLLM joins request ids with commas when it renews leases.
Identifier = Annotated[str, Field(pattern=r"^[^\s,]+$", max_length=1024)]
BlockId = Annotated[int, Field(ge=0, le=MAX_BLOCK_ID)]


def _as_list(value: object) -> object:
    """Turn a tuple into a list: vLLM's prefill side hands over a tuple of lists, which JSON makes a list of lists."""
    return list(value) if isinstance(value, tuple) else value


class TransferRefused(ValueError):
    """A transfer that a request cannot use; the message has the parameter, the value got and the value expected."""

    def __init__(self, name: str, got: object, expected: str):
        self.name = name
        super().__init__(f"{name}: got {reprlib.repr(got)}, expected {expected}")


class TransferParams(BaseModel):
    """A prompt's KV, as vLLM's prefill side describes it. Parameters that a decode side does not read are left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    do_remote_prefill: bool
    remote_engine_id: Identifier
    remote_request_id: Identifier
    """The prefill side's id of the request; it also names the lease of the request's blocks."""
    remote_host: str = Field(pattern=r"^[A-Za-z0-9._:%\[\]-]+$", max_length=255)
    remote_port: int = Field(ge=1, le=65535)
    """Port of the prefill instance's handshake listener."""
    remote_block_ids: Annotated[
        list[Annotated[list[BlockId], Field(min_length=1), FailFast()]],
        Field(min_length=1, max_length=1),
        BeforeValidator(_as_list),
    ]
    """Ids of the prompt's blocks, in the only KV cache group of a prefill instance.

    NOTE: without `FailFast`, an error for each of a million wrong ids would hold the scheduler for seconds.
    """
    remote_num_tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Number of tokens whose KV these blocks hold."""
    tp_size: int = Field(ge=1)
    pp_size: int = Field(default=1, ge=1, le=1)
    dcp_size: int = Field(default=1, ge=1, le=1)
    transfer_mode: Literal["pull"] = "pull"
    remote_blocks_expiry_time: float | None = None
    """End of these blocks' lease unless it is renewed, by the prefill instance's `time.perf_counter`; None: not
    stated."""
    kv_lease_duration: float | None = Field(default=None, gt=0)
    """Duration of the prefill instance's leases in seconds; None: not stated."""
    remote_registration_generation: int = Field(default=0, ge=0)
    """How often the prefill instance has registered its memory anew (vLLM 0.33: after it slept)."""

    @classmethod
    def parse(cls, params: object) -> TransferParams | None:
        """Check a request's parameters; None if they ask for no transfer.

        Raises:
            TransferRefused: the first parameter that is missing, of the wrong type or out of range.
        """
        if params is None:
            return None
        if not isinstance(params, dict):
            raise TransferRefused("kv_transfer_params", params, "an object")
        if params.get("do_remote_decode"):
            raise TransferRefused("do_remote_decode", params["do_remote_decode"], "false on a decode instance")
        if not params.get("do_remote_prefill"):
            return None
        try:
            return cls.model_validate(params)
        except ValidationError as error:
            raise _refusal(error) from None

    def check_tp_size(self, expected: int) -> None:
        """Raise `TransferRefused` unless the prefill instance has as many tensor parallel ranks as expected.

        NOTE: vLLM's handshake listener ends for good when it is asked for a rank that it does not have.
        """
        if self.tp_size != expected:
            raise TransferRefused("tp_size", self.tp_size, f"{expected}, the value of prefill_tp_size")

    def check_prompt(self, num_tokens: int, block_size: int) -> None:
        """Raise `TransferRefused` unless this is the KV of `num_tokens` prompt tokens in blocks of `block_size`."""
        if self.remote_num_tokens != num_tokens:
            raise TransferRefused("remote_num_tokens", self.remote_num_tokens, f"{num_tokens}, the prompt's length")
        num_blocks = -(-num_tokens // block_size)
        if len(self.remote_block_ids[0]) != num_blocks:
            got = f"{len(self.remote_block_ids[0])} blocks"
            expected = f"{num_blocks} of {block_size} tokens each; start both sides with the same --block-size"
            raise TransferRefused("remote_block_ids", got, expected)


def asks_for_transfer(params: object) -> bool:
    """Return True if a request's parameters ask that its KV be read from another instance, or be kept for one."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill") or params.get("do_remote_decode"))


def _refusal(error: ValidationError) -> TransferRefused:
    detail = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return TransferRefused(name, None, "a value")
    return TransferRefused(name, detail["input"], re.sub(r"^\w+ should (be|have|match) ", "", detail["msg"]))
