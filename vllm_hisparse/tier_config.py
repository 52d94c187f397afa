"""Options of the tiers below the host pool: entries of `tiers` in `kv_connector_extra_config`."""

from __future__ import annotations

import os
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BUFFER_SHARE = 1 / 32  # default size of the transfer buffer, as a share of the host pool
MAX_SIZE = 2**34  # largest size in GiB, and largest ratio of sizes: 64 bits address no more GiB
MIN_BUFFER_BYTES, MAX_BUFFER_BYTES = 2**29, 4 * 2**30  # bounds of this default
PEER = r"^[^:\s]+:\d{1,5}$"


class TierOptions(BaseModel):
    """Options that all tiers have."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def secondary_tier(self) -> dict[str, Any]:
        """Entry of `secondary_tiers` in vLLM's tiering."""
        raise NotImplementedError

    def without_secrets(self, message: str) -> str:
        """Return a message without the secrets among these options."""
        return message


class FsTier(TierOptions):
    """Blocks as files of a directory: a local disk, or a file system that several nodes mount."""

    type: Literal["fs"]
    path: str = Field(min_length=1)
    """Directory; created if it does not exist. Engines with the same model and layout may share it."""
    quota_gib: float = Field(gt=0, le=MAX_SIZE)
    """GiB of block files in the directory, whoever wrote them; the least recently used ones are deleted."""
    num_threads: int = Field(default=8, gt=0)
    """Threads that read, and as many that write. A thread moves the blocks of a job, up to 32, one after the other."""

    def secondary_tier(self) -> dict[str, Any]:
        return {
            "type": "hisparse_fs",
            "root_dir": self.path,
            "quota_bytes": int(self.quota_gib * 2**30),
            "n_read_threads": self.num_threads,
            "n_write_threads": self.num_threads,
        }

    def __str__(self) -> str:
        return f"fs at {self.path}, {self.quota_gib:g} GiB"


class P2PTier(TierOptions):
    """The host pools of other decode instances, over NIXL."""

    type: Literal["p2p"]
    host: str | None = None
    """Address that peers reach this instance at. Default: VLLM_P2P_SIDE_CHANNEL_HOST."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port for peers; data parallel rank r listens on `port + r`. Default: VLLM_P2P_SIDE_CHANNEL_PORT."""
    peers: list[Annotated[str, Field(pattern=PEER)]] = []
    """Instances to ask, as host:port; a name stands for all addresses it resolves to. Empty: only answer."""

    @property
    def own_host(self) -> str:
        """Address at which peers reach this instance."""
        return self.host or os.environ.get("VLLM_P2P_SIDE_CHANNEL_HOST", "localhost")

    def secondary_tier(self) -> dict[str, Any]:
        return {"type": "hisparse_p2p", "host": self.host, "port": self.port}

    def __str__(self) -> str:
        return f"p2p, peers {', '.join(self.peers) or 'none: this instance only answers'}"


class ObjTier(TierOptions):
    """Blocks as objects of an S3-compatible store, over NIXL's OBJ plugin."""

    type: Literal["obj"]
    bucket: str = Field(min_length=1)
    endpoint: str = Field(min_length=1)
    """Host and port of the store, such as "minio:9000"."""
    scheme: Literal["http", "https"] = "https"
    region: str = ""
    ca_bundle: str = ""
    access_key: str = Field(default="", repr=False)
    """Default, here and for the next two: what the AWS SDK finds in its environment."""
    secret_key: str = Field(default="", repr=False)
    session_token: str = Field(default="", repr=False)
    prefix: str = ""
    """Put before the names of all objects."""
    num_threads: int = Field(default=4, gt=0)
    """Threads of NIXL's backend."""

    def secondary_tier(self) -> dict[str, Any]:
        names = ("bucket", "scheme", "region", "ca_bundle", "access_key", "secret_key", "session_token")
        store = {name: getattr(self, name) for name in names}
        store["endpoint_override"] = self.endpoint
        return {
            "type": "hisparse_obj",
            "store_config": store,
            "prefix": self.prefix,
            "io_threads": self.num_threads,
        }

    def without_secrets(self, message: str) -> str:
        for secret in filter(None, (self.access_key, self.secret_key, self.session_token)):
            message = message.replace(secret, "***")
        return message

    def __str__(self) -> str:
        return f"obj in bucket {self.bucket} at {self.scheme}://{self.endpoint}"


def is_loopback(host: str) -> bool:
    """Return True if a name or address is one of the host itself by its form; names are not resolved."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Return True if an address stands for all interfaces, so that peers cannot connect to it."""
    with suppress(ValueError):
        return ip_address(host).is_unspecified
    return host == "*"


Tier = Annotated[FsTier | P2PTier | ObjTier, Field(discriminator="type")]
TIER_TYPES: dict[str, type[TierOptions]] = {"fs": FsTier, "p2p": P2PTier, "obj": ObjTier}
