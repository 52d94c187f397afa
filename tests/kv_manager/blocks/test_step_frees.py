"""How long blocks are kept that a step copies."""

from vllm_hisparse.kv_manager.blocks.step_frees import StepFrees


class Pool:
    """Notes how often each block is in use, of the device's or of the host's."""

    def __init__(self):
        self.in_use: list[str | int] = []

    def touch(self, blocks: list[str | int]) -> None:
        self.in_use += blocks

    def free_blocks(self, blocks: list[str | int]) -> None:
        for block in blocks:
            self.in_use.remove(block)

    pin, unpin = touch, free_blocks


def test_blocks_are_kept_until_the_step_that_copies_them_is_processed() -> None:
    device, host = Pool(), Pool()
    frees = StepFrees(device, host)
    frees.step_scheduled()
    frees.after_next_step("second", 2)
    frees.step_scheduled()
    frees.after_next_step("third", 3)
    frees.step_scheduled()
    for kept in (["second", "third"], ["third"], []):
        frees.step_processed()
        assert frees.blocks == device.in_use == kept
        assert host.in_use == [{"second": 2, "third": 3}[name] for name in kept]
